"""Running on a cluster: what a launch is, from a configuration and a profile; and the way to a Slurm cluster.

`tree`         values that remember where they were written
`walltime`     Slurm's way of writing times
`profiles`     `env.toml`: where to run
`environment`  variables of a job, named and never written down
`interpolate`  `${…}` and `???`
`bare`         an eval file by itself, as a configuration of one task
`compose`      `defaults:` lists, the command line, the profile, put together
`fields`       what a configuration may say, one model per block
`deployments`  the servers that are known, and their commands
`dialects`     keys of earlier launchers, in their place of today
`auxiliary`    servers beside that of the model
`nodes`        how many nodes and GPUs there are, and how servers are shared out among them
`adapter`      what `adapter_config` means here
`keys`         keys of hosted models, which must be passed on
`tasks`        eval files with values laid over them
`unused`       keys that have no effect, and why
`compiled`     a `Launch`: all of it in one form
`config`       from files to a checked `Launch`: `compile_launch`
`show`         the compiled configuration for people
`transport`    programs and files on the cluster: from its login node, or over ssh
`slurm`        submit, look at and cancel jobs
`layout`       the files of an invocation on the cluster
`submission`   who submitted what: intents before jobs, ids, and the list of this user's invocations
`squash`       Docker images as .sqsh files
`doctor`       whether a profile works, check by check
`finding`      the invocation, task or run that an id or a path means
`watching`     what an invocation is doing, as anybody may see it who can read its directory
`reading`      its logs, from one attempt to the next
`killing`      ending its jobs, and nothing else
`chain`        the jobs of a task, as they follow each other
`script`       the batch scripts
`ship`         this version of Holdfast, installed there once
`bundle`       the user's files, put there once
`describing`   a task as its jobs get it
`launch`       an invocation: begun, gone on with
`following`    … and followed
`foresight`    what a launch would find and do
`local`        the same on this machine
`node`         what a job does, and who it is
`neighbours`   its successor, and the workers beside it
`attempt`      its main part: serve, share out, work, end well
`handing`      … and the run handed on
`beside`       a worker's part
`preparing`    a run made ready for workers
`serving`      the servers of a job
"""
