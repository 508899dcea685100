"""The run directory: journals that survive anything, and the files made from them.

`lines`      how a line is sealed and checked
`records`    what a line holds
`manifest`   manifest.json as a struct
`metrics`    metrics.json and results.json as structs
`journal`    the one thread that appends and syncs
`durable`    durable small writes: atomic replace, directory sync
`index`      what is already there, read once when a run is opened
`tail`       what other workers have written since the last look
`lease`      who may write
`run_lock`   one process alone on a run, or workers side by side; lists and stops them
`processes`  identifies processes on this machine
`claims`     which worker does which trials
`blobs`      the files a trial works on, kept by content
`rundir`     the directory as a whole
`upgrade`    runs of earlier versions brought up to date
`catalog`    the runs below a runs directory, and as a list shows them

Of our packages only `canonical`, `versions`, `errors` are imported here.
"""
