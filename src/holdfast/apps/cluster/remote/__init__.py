"""Talking to a cluster: from its login node or over ssh.

`transport`   runs programs and copies files there
`trees`       the files that are copied, by their digests
`slurm`       submits, lists and cancels jobs
`invocation`  the files of an invocation on the cluster
`ledger`      who submitted what: intents before jobs, then ids; one process at a time
`registry`    the invocations of this user
`executor`    the protocol of executors
`chain`       the `slurm` executor: batch scripts, and the jobs of a task as they follow each other
`install`     installs this version of Holdfast there, once
`bundle`      copies the user's files there, once
`images`      converts Docker images into .sqsh files
`submit`      starts, resumes and previews an invocation
`local`       the `local` executor: processes on this machine
`doctor`      checks whether a profile works
"""
