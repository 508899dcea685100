"""A server on loopback for agents that nobody can look into. It speaks every API that has a dialect.

Each trial has a base URL of its own. What is asked there goes to the real server; the answers are recorded before their
end is handed over, counted, priced, and replayed from the record after a crash. An outage reaches the agent as it is.
It may recover; if it does not, its output is not taken as its answer.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlencode

import aiohttp
import msgspec
from aiohttp import web
from msgspec import UnsetType

from holdfast.dialects import dialect_of
from holdfast.dialects.types import STOPPED_EARLY
from holdfast.errors import AttemptError, Fault
from holdfast.http.client import client_of
from holdfast.spec.providers import endpoint_of
from holdfast.spec.redact import Secrets
from holdfast.store.records import ProxiedResponse, Usage
from holdfast.targets.access import eval_hints
from holdfast.targets.exchange import (
    Volatile,
    check_answer,
    dialect_at,
    place_of,
    read_counts,
    read_messages,
    without,
)
from holdfast.targets.prices import Prices
from holdfast.targets.types import Reading

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.dialects.types import StreamReader
    from holdfast.http.client import Balancer, Client
    from holdfast.spec.eval_schema import Price
    from holdfast.spec.schema import Api
    from holdfast.spec.target_schema import TargetBlock
    from holdfast.targets.exchange import Place
    from holdfast.targets.types import Calls

_MOST_BYTES: Final = 256 * 1024 * 1024
_GONE: Final = (ConnectionError, aiohttp.ClientError)
"""raised by writing to an agent that is gone; the answer is still kept"""
_KEYS: Final = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
"""headers with an agent's own key, passed on if the eval has no key"""
_KEY_VARIABLES: Final = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY")
"""where the providers' clients look for keys"""
DUMMY_KEY: Final = "sk-holdfast-the-proxy-adds-the-real-key"
"""given to agents instead of a key: clients do not start without one"""
_PASSED_ON: Final = ("anthropic-version", "anthropic-beta", "openai-organization", "openai-project", "openai-beta")
_PROVIDERS: Final[dict[str, Api]] = {"openai": "chat", "anthropic": "messages", "google": "gemini"}
"""with the API whose headers their other paths have too"""


class Proxy:
    """The server; one for a run."""

    def __init__(self, block: TargetBlock, prices: Mapping[str, Price], volatile: Sequence[Volatile] = ()) -> None:
        """`base_url`, `api_key_env` and `ignore` of the block count if it has them."""
        self._upstream = {name: _upstream(name, block) for name in _PROVIDERS}
        """by provider: base URLs, and the environment variable with the key"""
        self.secrets = Secrets(key_env for _, key_env in self._upstream.values())
        self._volatile = [*volatile, *map(Volatile, getattr(block, "ignore", ()))]
        self._prices = prices
        self._models: dict[str, Prices] = {}
        """the prices of the models that were asked"""
        self._trials: dict[str, Calls] = {}
        self._clients: dict[str, Client | Balancer] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=_MOST_BYTES)
        application.router.add_route("*", "/{trial}/{path:.*}", self._handle)
        application.router.add_route("*", "/{trial}", self._handle)
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

    def variables(self, calls: Calls) -> dict[str, str]:
        """Return the environment variables by which the providers' clients find the proxy.

        The proxy adds the keys. An agent, which may print its environment, gets none of them under any name.
        """
        url = self.base_url(calls)
        root = url.removesuffix("/v1")  # the other two providers' clients add the version
        real = {os.environ.get(key_env) for _, key_env in self._upstream.values()} - {None, ""}
        names = {name for name, value in os.environ.items() if name in _KEY_VARIABLES or value in real}
        # Google's clients complain about two keys.
        names.update(name for name in _KEY_VARIABLES[:3] if name != "GEMINI_API_KEY" or "GOOGLE_API_KEY" not in names)
        keys = dict.fromkeys(names, DUMMY_KEY)
        return {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "ANTHROPIC_BASE_URL": root,
            "GOOGLE_GEMINI_BASE_URL": root,
            **keys,
        }

    @contextmanager
    def serving(self, calls: Calls) -> Iterator[str]:
        """Take requests of an attempt at the trial's base URL, which is yielded; refuse them afterwards."""
        self._trials[calls.id] = calls
        try:
            yield self.base_url(calls)
        finally:
            self._trials.pop(calls.id, None)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        calls = self._trials.get(request.match_info["trial"])
        if calls is None:
            return _refusal(404, f"{request.path}: this is no base URL, or one of a trial that is over")
        if request.method in ("HEAD", "OPTIONS"):  # clients that look whether somebody is there
            return web.Response(headers={"Allow": "GET, HEAD, OPTIONS, POST"})
        if request.method not in ("GET", "POST"):
            return _refusal(405, f"{request.method} is not passed on: only GET and POST are")
        try:
            data = await request.read()
            body = msgspec.json.decode(data) if data else None
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, f"a request of more than {_MOST_BYTES:,} bytes is not passed on")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _refusal(400, f"only JSON is passed on, and the request is not JSON: {error}")
        place = place_of(request.match_info.get("path", ""), request.headers)
        if not place.path:
            return _refusal(404, f"there is nothing at {request.path}: a path such as /v1/responses has to follow")
        answer = _Answer(self, request, place, body)
        described = {"method": request.method, "path": place.path, "query": _query(place, request), "body": body}
        try:
            recorded = await calls.model(described, answer.ask, self._reading(place, described))
        except (AttemptError, Fault) as error:
            if answer.response is not None:  # cut off what was sent, so that it is not taken as complete
                if request.transport is not None:
                    request.transport.abort()
                return answer.response
            wait = getattr(error, "retry_after", None)
            headers = {} if wait is None else {"Retry-After": f"{wait:g}"}
            return _refusal(error.status or 502, error.message, error.kind, headers, error.body)
        return await answer.give(msgspec.convert(recorded, ProxiedResponse))

    def _reading(self, place: Place, request: dict[str, Any]) -> Reading:
        dialect = dialect_at(place)
        volatile = [*self._volatile, *map(Volatile, () if dialect is None else dialect.volatile)]
        return Reading(
            identity={**request, "body": without(request["body"], volatile)},
            messages=[] if dialect is None else dialect.conversation(request["body"]),
            usage=partial(self._usage, place),
            answers=partial(read_messages, place),
        )

    async def client(self, place: Place, request: web.Request) -> Client | Balancer:
        """Return the client for a path of the real server, with the key of the eval, or else the agent's own."""
        query = _query(place, request)
        path = f"{place.path}?{query}" if query and request.method != "GET" else place.path
        urls, key_env = self._upstream[place.provider]
        headers = {name: value for name, value in request.headers.items() if name.lower() in _PASSED_ON}
        if key := os.environ.get(key_env):
            headers = dialect_of(_PROVIDERS[place.provider]).headers(key) | headers
        else:
            own = {name: value for name, value in request.headers.items() if name.lower() in _KEYS}
            headers |= {name: value for name, value in own.items() if DUMMY_KEY not in value}
        name = f"{place.provider} {path} {sorted(headers.items())}"
        if name not in self._clients:
            hints = eval_hints(f"Check the key in {key_env}.")
            client = client_of([f"{url}/{path}" for url in urls], headers, hints)
            self._clients[name] = await client.__aenter__()
        return self._clients[name]

    def _usage(self, place: Place, recorded: Any) -> Usage:
        """Read the usage of an answer from its record."""
        response = msgspec.convert(recorded, ProxiedResponse)
        if response.free is True:
            return Usage(0, 0, 1, 0.0)
        return self._priced(str(response.model or "")).usage(read_counts(place, response))

    def _priced(self, model: str) -> Prices:
        if model not in self._models:
            self._models[model] = Prices(model, self._prices)
        return self._models[model]

    @property
    def final_notices(self) -> list[str]:
        """Charges without a known price, and servers that sent replies unasked."""
        parts = (*self._models.values(), *self._clients.values())
        return [notice for part in parts for notice in part.notices]


class _Answer:
    """A request on its way to the real server and back."""

    def __init__(self, proxy: Proxy, request: web.Request, place: Place, body: Any) -> None:
        self._proxy = proxy
        self._request = request
        self._body = body
        self._place = place
        self._dialect = dialect_at(place)
        self.response: web.StreamResponse | None = None
        """the response, once a part of it is sent"""
        self._held: list[Any] = []
        """the end of a stream, sent only when all of it is on record"""

    @property
    def _streams(self) -> bool:
        return self._place.streams or (isinstance(self._body, dict) and bool(self._body.get("stream")))

    @property
    def _as_events(self) -> bool:
        """False for an agent that asks Gemini for a list instead of events."""
        return not self._place.streams or self._request.query.get("alt") == "sse"

    async def ask(self) -> Any:
        """Ask the real server. A path that the server may not have is reported to the agent, and stops no run."""
        try:
            return msgspec.to_builtins(await self._ask())
        except Fault as fault:
            if fault.status != 404 or self._place.api not in (None, "responses"):
                raise
            missing = AttemptError("bad_request", fault.message, status=404, retry=False)
            missing.body = fault.body
            raise missing from fault

    async def _ask(self) -> ProxiedResponse:
        client = await self._proxy.client(self._place, self._request)
        model = self._place.model or (self._body.get("model") if isinstance(self._body, dict) else None)
        if self._request.method == "GET":
            return ProxiedResponse(model, whole=await client.get(self._request.query_string), free=True)
        if self._streams:
            return await self._stream(client, model)
        whole = await client.post(self._body)
        response = ProxiedResponse(model, whole=whole, counts=_usage_in(whole), free=self._place.free or msgspec.UNSET)
        if self._dialect is not None:
            check_answer(self._dialect, response)
        return response

    async def _stream(self, client: Client | Balancer, model: Any) -> ProxiedResponse:
        """Pass a stream on as it comes, but for its end."""
        body, hides_usage = self._body, False
        if self._place.api in ("chat", "completions"):
            options = body.get("stream_options") or {}
            hides_usage = isinstance(options, dict) and not options.get("include_usage")
            if hides_usage:  # else the usage of the call would be unknown
                body = {**body, "stream_options": {**options, "include_usage": True}}
        reader = None if self._dialect is None else self._dialect.reader()
        events: list[Any] = []
        counts: Any = None
        async for event in client.stream(body):
            if reader is not None:
                reader.feed(event)
            usage = _usage_in(event)
            counts = usage or counts
            if hides_usage and usage and not event.get("choices"):
                continue  # the agent did not ask for it
            events.append(event)
            if self._held or not self._as_events or (reader is not None and reader.ended):
                self._held.append(event)
            else:
                await self._send([event])
        if reader is not None and not reader.ended:
            raise AttemptError("bad_reply", STOPPED_EARLY)
        if reader is None or self._has_secrets(reader):
            events = self._proxy.secrets.clean_stream(events)
        response = ProxiedResponse(model, events=events, counts=counts)
        if self._dialect is not None:
            check_answer(self._dialect, response)
        return response

    def _has_secrets(self, reader: StreamReader) -> bool:
        """Return True if an answer contains a secret, or may, since it cannot be read."""
        try:
            message = reader.finish().message
        except AttemptError:
            return True
        return self._proxy.secrets.clean(message) is not message

    async def _send(self, events: list[Any]) -> None:
        if self.response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            self.response = web.StreamResponse(headers=headers)
            with suppress(*_GONE):
                await self.response.prepare(self._request)
        for event in events:
            kind = event.get("type") if self._place.api in ("messages", "responses", None) else None
            head = f"event: {kind}\n".encode() if kind else b""
            with suppress(*_GONE):
                await self.response.write(head + b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def give(self, recorded: ProxiedResponse) -> web.StreamResponse:
        """Send the recorded answer to the agent: all of it, or the end that was held back."""
        if isinstance(recorded.events, UnsetType) or not self._as_events:
            whole = recorded.whole if isinstance(recorded.events, UnsetType) else recorded.events
            return web.json_response(body=msgspec.json.encode(whole))
        await self._send(recorded.events if self.response is None else self._held)
        assert self.response is not None
        with suppress(*_GONE, asyncio.CancelledError):
            if self._place.api in ("chat", "completions", None):
                await self.response.write(b"data: [DONE]\n\n")
            await self.response.write_eof()
        return self.response


def _upstream(provider: str, block: TargetBlock) -> tuple[list[str], str]:
    """Return the base URLs of a provider, and the environment variable with its key."""
    # $OPENAI_BASE_URL counts as the base_url of models that have a prefix of the hub: here it is only OpenAI's.
    environ = {name: value for name, value in os.environ.items() if provider == "openai" or name != "OPENAI_BASE_URL"}
    own = endpoint_of("" if provider == "openai" else f"{provider}/any", environ=environ)
    base_url, key_env = getattr(block, "base_url", None), getattr(block, "api_key_env", None)
    urls = own.urls if base_url is None else endpoint_of("", None, base_url).urls
    return urls, key_env or own.key_env


def _query(place: Place, request: web.Request) -> str:
    """Return the query that goes to the server: a key in it is the agent's, and an answer of Gemini comes as events."""
    if place.provider != "google":
        return request.query_string
    query = {name: value for name, value in request.query.items() if name != "key"}
    return urlencode({**query, "alt": "sse"} if place.streams else query)


def _usage_in(reply: Any) -> Any:
    return reply.get("usage") if isinstance(reply, dict) else None


def _refusal(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    headers: Mapping[str, str] | None = None,
    body: Any = None,
) -> web.Response:
    """Return an error in the shape that clients read, with the real server's body if there is one."""
    if not isinstance(body, dict):
        body = {"type": "error", "error": {"message": message, "type": kind, "param": None, "code": kind}}
    return web.Response(status=status, headers=headers, body=msgspec.json.encode(body), content_type="application/json")
