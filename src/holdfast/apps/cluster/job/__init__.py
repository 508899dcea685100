"""Runs inside a job: serves the model, prepares the run, works on it, reports.

`__main__`   the entry point
`context`    the job that this process runs in
`main`       the main job: prepare, serve, work, end cleanly
`worker`     a worker job
`evaluate`   prepares a run for its workers and is one of them, in its own process
`process`    the processes that a job starts, in containers if asked: the evaluation, workers, exports, hooks
`servers`    the model servers of a job
`successor`  the jobs that a main job queues: its successor, and workers
"""
