"""The run directory: crash-safe journals, and the files derived from them.

`lines`      seals and checks journal lines
`answers`    classes of answers, and their counts
`records`    the records in the journals, as structs
`manifest`   manifest.json as a struct
`metrics`    metrics.json and results.json as structs
`journal`    the thread that appends and syncs
`files`      opens regular files of a sane size; replaces small files durably
`heads`      the fields of journal lines that an index takes, and what look-ups return
`index`      looks up the content of a run's journals by key
`index_files` published indexes, and the rule of their validity
`calls`      recorded calls of a conversation: which are in effect, and which were cut off
`spent`      what a run has spent so far
`damage`     damaged bytes of journals
`lease`      the right to write a run, with a heartbeat
`run_lock`   locks a run for one process or for several workers; lists and stops them
`processes`  identifies processes on this machine
`claims`     assigns trials to workers
`shared`     journals that a run shares with the run that it borrows from
`inputs`     the files that users' code read
`blobs`      stores the files of trials by content
`rundir`     the directory as a whole
`home`       Holdfast's own directory of this user, and the umask
`home_db`    a cache in that directory, shared by all processes
`catalog`    finds and summarizes the runs below a runs directory

Of Holdfast's other modules, this package imports only `canonical`, `versions`, `errors`.
"""
