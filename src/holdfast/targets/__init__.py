"""What is measured: one module per kind of target, all with the same single method.

`types`     Turn, Reply, and the base class of targets
`model`     a model behind an OpenAI-compatible API
`client`    the HTTP client all of them share, and what its failures mean
`sse`       server-sent events, parsed as they arrive
`balancer`  the same for several servers of one model, and `endpoints`, where those are
`embedded`  the small model that comes with the `local` extra, and `embedded_server`, its process
`cores`     how many cores that process may use
`python`    a Python function, and `lifetime`, which opens and closes it where it is an object
`http`      a workflow behind HTTP, and `nat_stream`, the inner steps that it reports
`command`   a program
`guard`     the target of a plug-in, which is not trusted
`proxy`     an OpenAI-compatible server on loopback, whose calls are recorded
`tools`     Python functions a model may call, and `mcp`, the tools of MCP servers
`scripted`  tools that answer by a script
`trace`     the tool calls of a turn, gathered from all that passes by
`prices`    dollars per token
`build`     the target of an eval: its identity and construction
"""
