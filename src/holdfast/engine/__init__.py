"""Runs evals: one sliding window of trials, whatever the target and the machine.

`run`            the entry to a run: opens it, works on it, writes the report
`session`        an open run, and three ways to take it: exclusively, as a worker, to finish it
`suite`          runs the cells of a suite with one budget
`worker`         a run that several workers share: prepared, worked on chunk by chunk, finished
`local_workers`  starts, monitors and stops workers on this machine
`options`        how one process goes about a run, and what a worker reports to the process that started it
`outcome`        how a run ended: finished, gates, failures, numbers so far
`loop`           keeps a window of trials in flight
`trial`          the life of one trial: asked with retries, recorded, graded
`calls`          the model and tool calls of one attempt, from the record or made
`replay`         the record of a trial's calls, which answers them after a crash
`grading`        asks graders as soon as an output is on disk, or about all outputs together
`recorder`       writes records: to disk first, then to index, progress and display
`retry`          time limits, retries, and failures that stop the run
`concurrency`    the size of the window, and a suggestion to use more cores
`brake`          stops a run early: faults, budgets, the user
`signals`        handles Ctrl-C and SIGTERM, the first and the second
`user_code`      checks the values that users' functions ask for, and finds code that keys do not cover

What few runs need:

`workspace`      the folder of a trial, saved after each turn
`hooks`          programs of the user before and after a run and its trials
`inputs`         records the files that users' code reads
`gates`          the gate of an eval file: its baseline, and its checks
`settlement`     decisions of a person about calls that were cut off
`collecting`     collects the batches of a run that waits for them
`pairwise`       judges finished runs against each other
"""
