"""Decide what a run has to do, before it does anything.

`identity` identifies a run: everything that its keys are made of
`keys`     computes the keys of trials and runs
`plan`     counts and lists what is finished, to grade and to run
`finished` publishes which trials of a large run are finished
`inputs`   finds stale records: their code read a file that has changed since
`history`  finds earlier runs that can lend, and what has changed since the nearest one
`reuse`    borrows outputs and grades of other runs
`changes`  describes what has changed
`progress` counts while a run works, for displays
"""
