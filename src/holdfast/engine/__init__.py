"""Runs evals: one sliding window of trials, whatever the target and the machine.

`run`            the entry to a run: opens it, works on it, writes the report
`session`        an open run, how one process goes about it, and three ways to take it
`suite`          runs the cells of a suite with one budget
`worker`         a run that several workers share: prepared, worked on chunk by chunk, finished
`local_workers`  starts, monitors and stops workers on this machine
`loop`           keeps a window of trials in flight
`trial`          the life of one trial: asked with retries, recorded, graded
`calls`          the model and tool calls of one attempt, from the record or made
`replay`         the record of a trial's calls, which answers them after a crash
`grading`        asks graders as soon as an output is on disk, or about all outputs together
`recorder`       writes records: to disk first, then to index, progress and display
`retry`          time limits, retries, and failures that stop the run
`admission`      how many trials are in flight: the size of the window, and what stops a run early
`signals`        handles Ctrl-C and SIGTERM, the first and the second
`user_code`      checks the values that users' functions ask for, and finds code that keys do not cover

What few runs need:

`attached`       messages between a worker and the process that started it
`workspace`      the folder of a trial, saved after each turn
`hooks`          programs of the user before and after a run and its trials
`inputs`         records the files that users' code reads
`gates`          the gate of an eval file: its baseline, and its checks
`settlement`     decisions of a person about calls that were cut off
`pairwise`       judges finished runs against each other
"""
