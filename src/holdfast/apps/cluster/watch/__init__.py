"""Reporting on what was submitted.

`find`    finds the invocation, task or run that an id or a path names
`status`  reports the status of an invocation to anybody who can read its directory
`logs`    reads and follows logs, across jobs
`copies`  copies runs from clusters for commands that read runs
`cleanup` cancels the jobs of an invocation, and nothing else; removes what no run needs
"""
