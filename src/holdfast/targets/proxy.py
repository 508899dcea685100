"""An OpenAI-compatible server on loopback for agents that nobody can look into.

Each trial has a base URL of its own. What is asked there goes to the real server; the answers are recorded before their
end is handed over, counted, priced, and after a crash given from the record. An outage reaches the agent as it is:
whether it gets over it is its own affair, but what it says without having got over it is not taken as its answer.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
import msgspec
from aiohttp import web
from msgspec import UnsetType

from holdfast.dialects.chat import check_choice
from holdfast.dialects.reading import count
from holdfast.dialects.types import TokenCounts
from holdfast.errors import AttemptError, Fault
from holdfast.spec.providers import endpoint_of
from holdfast.store.records import ProxiedResponse, Usage
from holdfast.targets.balancer import client_of
from holdfast.targets.client import bearer
from holdfast.targets.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.spec.schema import CommandTarget, Price, PythonTarget
    from holdfast.targets.balancer import Balancer
    from holdfast.targets.client import Client
    from holdfast.targets.types import Calls

_MOST_BYTES: Final = 256 * 1024 * 1024
_GONE: Final = (ConnectionError, aiohttp.ClientError)
"""what writing to an agent raises that has gone; the answer is kept all the same"""
_COMPLETIONS: Final = ("chat/completions", "completions")
"""where a 404 means that the address or the model is wrong; elsewhere it is an agent that tries what there is"""
_RESPONSE_ENDS: Final = ("response.completed", "response.incomplete", "response.failed")
"""the events that end a stream of the Responses API"""
_PASSED_ON: Final = ("authorization", "openai-organization", "openai-project", "openai-beta", "x-api-key", "api-key")


class Proxy:
    """The server; one for a run."""

    def __init__(self, block: CommandTarget | PythonTarget, prices: Mapping[str, Price]) -> None:
        self._upstream = endpoint_of("", None, block.base_url).urls
        self._key_env = block.api_key_env
        self._prices = prices
        self._trials: dict[str, Calls] = {}
        self._clients: dict[str, Client | Balancer] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=_MOST_BYTES)
        application.router.add_route("*", "/{trial}/v1/{path:.*}", self._handle)
        application.router.add_route("*", "/{path:.*}", _unknown)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        for client in self._clients.values():
            await client.__aexit__()

    def base_url(self, calls: Calls) -> str:
        """Return the base URL of a trial's agent, which stays the same in this process."""
        return f"http://127.0.0.1:{self._port}/{calls.id}/v1"

    def admit(self, calls: Calls) -> None:
        """Assign requests to the trial's URL to this attempt from now on."""
        self._trials[calls.id] = calls

    def dismiss(self, calls: Calls) -> None:
        """Refuse further requests of the attempt."""
        self._trials.pop(calls.id, None)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        calls = self._trials.get(request.match_info["trial"])
        if calls is None:
            return _refusal(404, "this base URL belongs to a trial that is over")
        if request.method not in ("GET", "POST"):
            return _refusal(405, f"{request.method} is not passed on: only GET and POST are")
        try:
            data = await request.read()
            body = msgspec.json.decode(data) if data else None
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, f"a request of more than {_MOST_BYTES:,} bytes is not passed on")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _refusal(400, f"only JSON is passed on, and the request is not JSON: {error}")
        path = request.match_info["path"].strip("/")
        answer = _Answer(self, request, path, body)
        described = {"method": request.method, "path": path, "query": request.query_string, "body": body}
        try:
            recorded = await calls.model(described, answer.ask, self._usage)
        except (AttemptError, Fault) as error:
            if answer.response is not None:  # cut off what was sent, so that it is not taken as complete
                if request.transport is not None:
                    request.transport.abort()
                return answer.response
            wait = getattr(error, "retry_after", None)
            headers = {} if wait is None else {"Retry-After": f"{wait:g}"}
            return _refusal(error.status or 502, error.message, error.kind, headers, error.body)
        return await answer.give(msgspec.convert(recorded, ProxiedResponse))

    async def client(self, path: str, request: web.Request) -> Client | Balancer:
        """Return the client for a path of the real server, with the key of the eval, else the agent's own."""
        if request.query_string and request.method != "GET":
            path = f"{path}?{request.query_string}"
        headers = bearer(self._key_env) or {
            name: value for name, value in request.headers.items() if name.lower() in _PASSED_ON
        }
        key = f"{path} {sorted(headers.items())}"
        if key not in self._clients:
            urls = [f"{url}/{path}" for url in self._upstream]
            client = client_of(urls, headers, f"Check the key in {self._key_env}.")
            self._clients[key] = await client.__aenter__()
        return self._clients[key]

    def _usage(self, recorded: Any) -> Usage:
        """Read the usage of an answer from its record."""
        response = msgspec.convert(recorded, ProxiedResponse)
        if response.free is True:
            return Usage(0, 0, 1, 0.0)
        counts = response.counts if isinstance(response.counts, dict) else {}
        prices = Prices(str(response.model or ""), self._prices)
        sent = counts.get("prompt_tokens", counts.get("input_tokens"))
        received = counts.get("completion_tokens", counts.get("output_tokens"))
        if received is None and sent is not None and counts.get("total_tokens") == sent:
            received = 0  # embeddings
        return prices.usage(TokenCounts(input=count(sent), output=count(received)))


class _Answer:
    """A request on its way to the real server and back."""

    def __init__(self, proxy: Proxy, request: web.Request, path: str, body: Any) -> None:
        self._proxy = proxy
        self._request = request
        self._body = body
        self._path = path
        self.response: web.StreamResponse | None = None
        """the response, once a part of it is sent"""
        self._held: list[Any] = []
        """the end of a stream, sent only when all of it is on record"""

    @property
    def _streams(self) -> bool:
        return isinstance(self._body, dict) and bool(self._body.get("stream"))

    async def ask(self) -> Any:
        """Ask the real server. A path that the server does not have is reported to the agent, and stops no run."""
        try:
            return msgspec.to_builtins(await self._ask())
        except Fault as fault:
            if fault.status != 404 or self._path in _COMPLETIONS:
                raise
            missing = AttemptError("bad_request", fault.message, status=404, retry=False)
            missing.body = fault.body
            raise missing from fault

    async def _ask(self) -> ProxiedResponse:
        """Pass a stream on as it comes, but for its end."""
        client = await self._proxy.client(self._path, self._request)
        model = self._body.get("model") if isinstance(self._body, dict) else None
        if self._request.method == "GET":
            return ProxiedResponse(model, whole=await client.get(self._request.query_string), free=True)
        if not self._streams:
            whole = await client.post(self._body)
            counts = whole.get("usage") if isinstance(whole, dict) else None
            return ProxiedResponse(model, whole=whole, counts=counts)
        body = dict(self._body)
        options = body.get("stream_options") or {}
        wants_usage = not isinstance(options, dict) or bool(options.get("include_usage"))
        responses = self._path == "responses"
        chat = not responses and ("messages" in body or "prompt" in body)
        if chat and not wants_usage:  # else the usage of the call would be unknown
            body["stream_options"] = {**options, "include_usage": True}
        events: list[Any] = []
        counts, finished = None, not (chat or responses)
        async for event in client.stream(body):
            try:
                usage = event.get("usage") or (event.get("response") or {}).get("usage")
                choices = event.get("choices") or []
                for choice in choices:
                    check_choice(choice)
                ends = any(choice.get("finish_reason") for choice in choices) or event.get("type") in _RESPONSE_ENDS
            except (AttributeError, TypeError) as error:
                raise AttemptError("bad_reply", f"not an event of a completion: {event!r:.200}") from error
            counts = usage or counts
            finished |= ends
            if chat and not wants_usage and usage and not choices:
                continue  # the agent did not ask for it
            events.append(event)
            if ends or self._held:
                self._held.append(event)
            else:
                await self._send([event])
        if not finished:
            raise AttemptError("bad_reply", "the stream ended before the answer did")
        return ProxiedResponse(model, events=events, counts=counts)

    async def _send(self, events: list[Any]) -> None:
        if self.response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            self.response = web.StreamResponse(headers=headers)
            with suppress(*_GONE):
                await self.response.prepare(self._request)
        for event in events:
            kind = None if "choices" in event else event.get("type")
            head = f"event: {kind}\n".encode() if kind else b""
            with suppress(*_GONE):
                await self.response.write(head + b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def give(self, recorded: ProxiedResponse) -> web.StreamResponse:
        """Send the recorded answer to the agent: all of it, or the end that was held back."""
        if isinstance(recorded.events, UnsetType):
            return web.json_response(body=msgspec.json.encode(recorded.whole))
        await self._send(recorded.events if self.response is None else self._held)
        assert self.response is not None
        with suppress(*_GONE, asyncio.CancelledError):
            await self.response.write(b"data: [DONE]\n\n")
            await self.response.write_eof()
        return self.response


async def _unknown(request: web.Request) -> web.StreamResponse:
    await request.release()
    return _refusal(404, f"there is no {request.path} here: use $OPENAI_BASE_URL as it is, with its /v1 at the end")


def _refusal(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    headers: Mapping[str, str] | None = None,
    body: Any = None,
) -> web.Response:
    """Return an error in the shape that clients read, with the real server's body where there is one."""
    if not isinstance(body, dict):
        body = {"error": {"message": message, "type": kind, "param": None, "code": kind}}
    return web.Response(status=status, headers=headers, body=msgspec.json.encode(body), content_type="application/json")
