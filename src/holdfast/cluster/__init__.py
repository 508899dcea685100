"""Runs on a Slurm cluster.

`transport`   programs and files on the cluster: from its login node, or over ssh
`slurm`       submit, look at and cancel jobs
`submission`  who submitted what: intents before jobs, ids, and the list of this user's invocations
"""
