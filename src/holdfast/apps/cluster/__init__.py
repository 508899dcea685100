"""Running on a cluster.

`config`  reads configurations and profiles, and compiles them into a `Launch`; it only reads files
`remote`  talks to the cluster: programs, files, jobs, and what was submitted
`job`     runs inside a job
`watch`   reports on invocations, stops them, and copies their runs
"""
