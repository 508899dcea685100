"""Targets: one module per kind.

`types`     Turn, Reply, and the base class of targets
`model`     a model behind an API
`signing`   how requests to models are authenticated
`likelihood` a model that is asked for likelihoods, and `likelihood_forms`, its requests
`tokenizer` token ids, from the server or from a file
`model_server` the paths of a model's server, and how many requests are in flight
`client`    the HTTP client that all share, and the meaning of its failures
`connections` HTTP to one server over kept connections, and `web_session`, which does the rest with aiohttp
`rate_limits` what servers say about when to ask again
`concurrency` the number of requests in flight, where the eval sets none
`sse`       server-sent events, parsed as they arrive
`balancer`  a client for several servers of one model
`batches`   requests that are answered in batches, and `batch_apis`, the forms of providers
`batch_client` the client of one model that is asked in batches
`batch_files` batches as files, for models without a server
`asking`    who makes a request
`embedded`  the small model that comes with the `local` extra, and `embedded_server`, its process
`python`    a Python function, or an object that is opened and closed
`http`      a workflow behind HTTP
`command`   a program
`agents`    Claude Code and Codex, as programs
`guard`     the target of a plug-in, which is not trusted
`proxy`     a server on loopback for all APIs of models, whose calls are recorded
`exchange`  a request of a program to a model, and its answer
`matching`  which requests of a program count as the same
`tools`     Python functions that a model may call, and `mcp`, the tools of MCP servers
`scripted`  tools that answer from a script
`trace`     the tool calls of a turn, collected from requests and replies
`prices`    dollars per token
`build`     the target of an eval: its identity and construction
"""
