"""The run itself: one sliding window of trials, whatever the target and the place.

`options`    what the command line says about this attempt at a run
`session`    one entry to a run: opened, worked on, reported
`parameters` whether rows have what users' functions ask for
`unseen`     what keys do not cover of an eval's code
`outcome`    how a run ended: finished, gates, failures, numbers so far
`pairwise`   finished runs judged against each other
`worker`     a run shared out among workers: prepared, worked on, finished
`local_workers`  workers on this machine, started and watched
`ended`      why a worker stopped, as it says so itself
`loop`       the window of trials: generate, keep, grade, keep
`sources`    where the loop's trials come from; those of a worker are claimed chunk after chunk
`trial`      the life of one trial: asked with retries, recorded, graded
`hooks`      the user's programs around the run and its trials
`replay`     the calls of a conversation, answered from the record after a crash
`again`      calls that are run again where the state they built has been lost
`workspace`  a trial's folder, kept after each turn
`grading`    graders, as each output lands
`recorder`   records: on disk first, then everywhere else
`retry`      time-outs, retries and what is a fault of all
`concurrency`  how many at once
`brake`      why and how a run stops early
`signals`    Ctrl-C and SIGTERM, the first and the second
`budget`     limits of cost, tokens and time
`log`        what happened, for people
"""
