"""Targets: one module per kind.

`types`     Turn, Reply, the base class of targets, and the interface to batches
`build`     the target of an eval: its identity, its construction, and its concurrency; cores of this process
`model`     a model with an API
`access`    how requests are authenticated, and hints about refusals
`likelihood` a model that is asked for likelihoods, its token ids, and `likelihood_forms`, its requests
`embedded`  the small model that comes with the `local` extra, and its server
`python`    a Python function, or an object that is opened and closed
`http`      a workflow with an HTTP interface
`command`   a program
`agents`    Claude Code and Codex, as programs
`guard`     the target of a plug-in, which is not trusted
`proxy`     a server on loopback for all APIs of models, whose calls are recorded
`exchange`  a request of a program to a model, and its answer
`tools`     Python functions and scripts that a model may call, and `mcp`, the tools of MCP servers
`trace`     the tool calls of a turn, collected from requests and replies
`prices`    dollars per token
"""
