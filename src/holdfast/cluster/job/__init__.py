"""Runs inside a job: serves the model, prepares the run, works on it, reports.

`node`       the entry point, and which job this is
`main`       the main job: serve, prepare, work, end in good order
`worker`     a worker job
`prepare`    prepares a run for its workers, in its own process
`servers`    the model servers of a job
`successor`  the job that follows this one, and the workers beside it
`local`      the main process of a launch on this machine
`after_run`  exports of a finished run
"""
