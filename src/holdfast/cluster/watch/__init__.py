"""Reporting on what was submitted.

`find`    the invocation, task or run that an id or a path means
`status`  what an invocation is doing, for anybody who can read its directory
`logs`    its logs, from one job to the next, and following them to the end
`kill`    cancels its jobs, and nothing else
"""
