"""The run directory: crash-safe journals, and the files derived from them.

`lines`      seals and checks journal lines
`answers`    classes of answers, and their counts
`records`    the records in the journals, as structs
`manifest`   manifest.json as a struct
`metrics`    metrics.json and results.json as structs
`gate`       gate.json as structs
`journal`    the thread that appends and syncs
`durable`    durable small writes: atomic replace, directory sync
`run_files`  opens the files of a run: regular files of a sane size
`spool`      bytes that are set aside in a temporary file
`index`      the content of the journals, read once when a run is opened
`damage`     damaged bytes of journals
`index_table`  its outputs and verdicts, packed
`texts`      reads the answers of many outputs
`cache_file`  files of caches, under a digest
`index_cache`  stores the index of a large run, so that only what was appended is read again
`step_places` where the calls of each trial are in a long journal, so that no search is needed
`trial_table` trials as typed columns, in memory and as one checked file
`trial_notes` the files that such a table was made from
`output_rows` outputs as rows of numbers, for columns
`refs`       an output and a verdict, as the index refers to them
`tail`       follows the journals of other workers
`lease`      the right to write a run, with a heartbeat
`run_lock`   locks a run for one process or for several workers; lists and stops them
`processes`  identifies processes on this machine
`claims`     assigns trials to workers
`shared`     journals that a run shares with the run that it borrows from
`inputs`     the files that users' code read
`batches`    the ledger of batches, and their results
`blobs`      stores the files of trials by content
`rundir`     the directory as a whole
`home`       Holdfast's own directory of this user, and the umask
`home_db`    a cache in that directory, shared by all processes
`catalog`    finds and summarizes the runs below a runs directory

Of the other packages this one imports only `canonical`, `versions`, `errors`.
"""
