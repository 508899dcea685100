"""The run directory: crash-safe journals, and the files derived from them.

`lines`      seals, checks and finds journal lines, and moves damaged ones out of a journal
`records`    the records in the journals, as structs; classes of answers; what a run has spent
`metrics`    metrics.json and results.json as structs
`journal`    the thread that appends and syncs
`files`      opens regular files of a sane size; replaces small files durably
`heads`      what is read of journal lines: for an index, by look-ups, and the recorded calls in effect
`index`      looks up the content of a run's journals by key
`index_files` published indexes, and the rule of their validity
`lease`      the right to write a run, with a heartbeat; identifies processes on this machine
`run_lock`   locks a run for one process or for several workers; lists and stops them
`claims`     assigns trials to workers
`shared`     journals that a run shares with the run that it borrows from
`blobs`      stores the files of trials by content
`rundir`     the directory as a whole, with its manifest
`home`       Holdfast's own directory of this user, with a cache that all processes share; the umask
`catalog`    finds and summarizes the runs below a runs directory

Of Holdfast's other modules, this package imports only `canonical`, `versions`, `errors`.
"""
