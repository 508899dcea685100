"""Runs inside a job: serves the model, prepares the run, works on it, reports.

`__main__`   the entry point
`context`    the job that this process runs in
`main`       the main job: prepare, serve, work, end cleanly
`worker`     a worker job
`evaluate`   prepares a run for its workers and is one of them, in its own process
`process`    starts and ends the processes that evaluate
`servers`    the model servers of a job
`containers` starts servers and tasks of local jobs in their images
`successor`  the jobs that a main job queues: its successor, and workers
`local`      the main process of a launch on this machine
`after_run`  exports of a finished run
"""
