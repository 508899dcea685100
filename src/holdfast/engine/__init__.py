"""Runs evals: one sliding window of trials, whatever the target and the machine.

`session`        the entry to a run: opens it, works on it, writes the report
`suite`          runs the cells of a suite with one budget
`options`        how one process goes about a run
`gates`          the gate of an eval file: its baseline, and its outcome
`outcome`        how a run ended: finished, gates, failures, numbers so far
`loop`           keeps a window of trials in flight
`trial`          the life of one trial: asked with retries, recorded, graded
`replay`         the recorded calls of a trial, answered from the record after a crash
`replay_again`   calls that run again where the state that they built is lost
`settlement`     decisions of a person about calls that were cut off
`workspace`      the folder of a trial, saved after each turn
`retry`          time-outs, retries, and failures that stop the run
`grading`        runs the graders as soon as an output is on disk
`sets`           asks graders that look at all outputs together, once these are complete
`recorder`       writes records: to disk first, then to index, progress and display
`time_limits`    time limits of attempts, with one timer for all
`sources`        where trials come from: all that are left, or the chunks of a worker
`spare_cores`    suggests workers where one process is the limit
`worker`         a run that several workers share: prepared, worked on, finished
`local_workers`  starts, monitors and stops workers on this machine
`ended`          the message in which a worker reports why it stopped
`hooks`          programs of the user before and after a run and its trials
`concurrency`    the size of the window
`budget`         limits of cost, tokens and time
`brake`          stops a run early
`signals`        handles Ctrl-C and SIGTERM, the first and the second
`parameters`     checks that rows have the values for which users' functions ask
`inputs`         records the files that users' code reads
`unseen`         finds code that keys do not cover
`pairwise`       judges finished runs against each other
`log`            `run.log`, for people
"""
