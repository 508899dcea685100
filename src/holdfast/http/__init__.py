"""An HTTP/1.1 client for JSON APIs: few requests or thousands at once, to one server or several.

It knows requests, responses, connections, TLS, redirects, streams of events, and what a failure means: whether a retry
may help (`AttemptError`), or every other request would fail too (`Fault`). It does not retry, and knows nothing about
who asks, or why.

`client`       requests with JSON to one URL, and the signature of each; balances several servers that answer alike
`connections`  HTTP/1.1 to one server over kept connections
`response`     the body of a response: read as it arrives, decompressed, limited, and parsed as JSON or as events
`session`      requests that need more of HTTP, made with aiohttp: proxies and uploads
`failures`     the errors for refusals and broken connections, and when to ask again
`urls`         URLs: without secrets, by their server, and through which proxy
"""
