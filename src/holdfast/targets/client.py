"""The HTTP client, and the meaning of each of its failures.

A failure is either an `AttemptError`, which concerns one trial and may be retried, or a `Fault`, which every other
request would meet too. No other exception leaves this module.
"""

from __future__ import annotations

import re
import socket
import ssl
from codecs import BOM_UTF8
from contextlib import asynccontextmanager, suppress
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, Final, Self
from urllib.parse import parse_qsl, urljoin, urlsplit

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from holdfast import __version__
from holdfast.dialects.reading import mend
from holdfast.errors import AttemptError, Fault
from holdfast.spec.redact import bare_url
from holdfast.targets.connections import Connections, TooLong
from holdfast.targets.rate_limits import limit_reset, retry_after

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator, Mapping

    from holdfast.targets.connections import Response
    from holdfast.targets.signing import Signer
    from holdfast.targets.sse import Event
    from holdfast.targets.web_session import WebResponse, WebSession

_decode = msgspec.json.Decoder().decode
_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_MOST_REDIRECTS: Final = 5
"""of one request"""


class Reported(msgspec.Struct, frozen=True):
    """An event of a stream, or a whole reply."""

    value: Any = UNSET
    """the JSON of an event, or of a whole reply"""
    other: tuple[bytes, ...] = ()
    """lines of an event whose field is not in the standard, such as `intermediate_data: …`"""
    whole: bool = False
    """the reply was one JSON document and not a stream"""


_END = Reported()
"""the end of a stream, as the server marks it"""


class Client:
    """POSTs JSON to one URL over kept connections."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        key_hint: str = "",
        path_hint: str = "",
        secrets: Iterable[str] = (),
        signer: Signer | None = None,
    ) -> None:
        self.url = bare_url(url)
        """without credentials and query, for messages"""
        self._url = url
        self._key_hint = key_hint
        self._path_hint = path_hint
        """a hint for 404; default: one for OpenAI-compatible servers"""
        self._headers = {
            "Content-Type": "application/json",
            "User-Agent": f"holdfast/{__version__}",
            **headers,
        }
        words = [word for value in headers.values() for word in value.split()]
        words += [value or name for name, value in parse_qsl(urlsplit(url).query, keep_blank_values=True)]
        self._secrets = [word for word in [*words, *secrets] if len(word) > 7]
        self._signer = signer
        self._connections: Connections | None = None
        """None: requests go through a proxy"""
        self._session: WebSession | None = None

    async def __aenter__(self) -> Self:
        try:
            if _proxy(self.url) is None:
                self._connections = Connections(self._url, self._headers)
        except ValueError as error:
            raise Fault("refused", f"{self.url} cannot be asked: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        for opened in (self._connections, self._session):
            if opened is not None:
                await opened.close()

    @property
    def notices(self) -> list[str]:
        """Report a server whose connections cannot be reused."""
        if self._connections is None or not self._connections.strayed:
            return []
        notice = (
            f"{self.url} sent replies that no request had asked for. They were dropped, and since then each request "
            "has had a connection of its own. If one of them arrived while another request was waiting, it was taken "
            "for the answer: check the server, or the proxy in front of it."
        )
        return [notice]

    def post(self, body: Any) -> Coroutine[Any, Any, Any]:
        """Post JSON and return the JSON of the reply."""
        return self._ask("POST", self._url, msgspec.json.encode(body))

    def get(self, query: str = "") -> Coroutine[Any, Any, Any]:
        """Return the JSON at the URL."""
        return self._ask("GET", urlsplit(self._url)._replace(query=query).geturl(), b"")

    async def _ask(self, method: str, url: str, data: bytes) -> Any:
        try:
            response = await self._request(method, url, data, whole=True)
            data = await response.read()
        except OSError as error:
            raise self._classify_exception(error) from error
        if response.status >= 300:
            raise self._classify_response(response.status, response.headers, data)
        return self.check(self.parse(data))

    def check(self, value: Any) -> Any:
        """Return the JSON of a reply; raise the error that it reports although its status is good."""
        if is_error(value):
            raise self._failure(msgspec.json.encode(value), "with status 200")
        return value

    async def _request(self, method: str, url: str, data: bytes, *, whole: bool) -> Response | WebResponse:
        """Make a request; return the response when its head has arrived, or with `whole` all of it.

        Redirects are followed on the same server, with the same method and body, except for 303, which asks for a GET.
        """
        for _ in range(1 + _MOST_REDIRECTS):
            headers = None if self._signer is None else await self._signer.headers(url, data)
            response: Response | WebResponse
            if self._connections is not None:
                response = await self._connections.request(method, url, data, headers, whole=whole)
            else:
                response = await self._opened_session().request(method, url, data, headers)
            if response.status not in _REDIRECTS or "location" not in response.headers:
                return response
            response.close()
            url = self._redirected(url, response.headers["location"])
            if response.status == 303:
                method, data = "GET", b""
        raise self._loop_of_redirects()

    def _redirected(self, url: str, location: str) -> str:
        """Return the address that a redirect leads to; raise Fault if it belongs to another server.

        Another server may be anybody's: it gets neither the key nor the prompt.
        """
        try:
            new = urljoin(url, location)
            if _origin(new) == _origin(url):
                return new
        except ValueError:  # not a URL
            new = location
        shown = self._without_secrets(bare_url(new))[:300]
        raise Fault(
            "rejected",
            f"{bare_url(url)} redirects to another server: {shown}. Nothing was sent there.",
            remedy="If you trust that server with the key and the prompts, set base_url (of an HTTP target: http) so "
            "that requests go there.",
        )

    def _loop_of_redirects(self) -> AttemptError:
        return AttemptError("bad_reply", f"{self.url} redirects more than {_MOST_REDIRECTS} times", retry=False)

    def _opened_session(self) -> WebSession:
        if self._session is None:
            from holdfast.targets.web_session import WebSession  # aiohttp takes long to import

            self._session = WebSession(self._headers, _proxy(self.url))
        return self._session

    @asynccontextmanager
    async def call(
        self, method: str, url: str, data: Any = None, content_type: str | None = None
    ) -> AsyncIterator[WebResponse]:
        """Make a request to another path of the server, and yield the response once its status is good.

        Only a GET is redirected: a file that was uploaded is at its end.
        """
        try:
            for _ in range(1 + _MOST_REDIRECTS):
                async with self._opened_session().call(method, url, data, content_type) as response:
                    if response.status in _REDIRECTS and "location" in response.headers:
                        new = self._redirected(url, response.headers["location"])
                        if method == "GET":
                            url = new
                            continue
                    if response.status >= 300:
                        raise self._classify_response(
                            response.status, response.headers, await response.read(), bare_url(url)
                        )
                    yield response
                    return
        except OSError as error:
            raise self._classify_exception(error) from error
        raise self._loop_of_redirects()

    def form(self, fields: Mapping[str, str], file: IO[bytes], name: str) -> tuple[Any, str]:
        """Return a form with a file, and its content type."""
        return self._opened_session().form(fields, file, name)

    def refusal(self, status: int, data: bytes) -> AttemptError | Fault:
        """Return the error for a request that was refused inside a batch: the same as for one that is sent alone."""
        return self._classify_response(status, {}, data)

    async def stream(self, body: Any, *, halves: bool = False) -> AsyncIterator[Any]:
        """Yield the JSON events of a reply. Callers check that the last one ends the answer."""
        async for event in self.events(body, end="close", halves=halves):
            if event.value is not UNSET:
                yield self.check(event.value) if event.whole else event.value

    async def events(self, body: Any, *, end: str | None = None, halves: bool = False) -> AsyncGenerator[Reported]:
        """Yield the events of a stream, or one event where the reply is a JSON document.

        With `halves`, texts may begin or end with half a character, and callers put them together (`reading.mend`).
        An error that the server reports inside a stream is raised. So is a stream that ended early: one without the
        event that `end` names, or, where nothing is named, one whose transport does not tell its end from a cut.
        With `end="close"` any end counts.
        """
        try:
            response = await self._request("POST", self._url, msgspec.json.encode(body), whole=False)
            try:
                if response.status >= 300:
                    raise self._classify_response(response.status, response.headers, await response.read())
                if "event-stream" not in response.headers.get("content-type", ""):
                    yield Reported(self.parse(await response.read()), whole=True)
                    return
                from holdfast.targets.sse import EventParser  # which whole replies do not need

                parser = EventParser()
                async for piece in response.pieces():
                    for report in self._read(parser.feed(piece), end, halves=halves):
                        if report is _END:
                            return
                        yield report
                for report in self._read(parser.close(), end, halves=halves):
                    if report is _END:
                        return
                    yield report
                self._check_end(response.headers, end)
            finally:
                response.close()
        except OSError as error:
            raise self._classify_exception(error) from error

    def _read(self, events: Iterable[Event], end: str | None, *, halves: bool) -> Iterator[Reported]:
        """Parse events, yield `_END` for the one that ends the stream, and raise the error that one reports."""
        for event in chain.from_iterable(map(_split, events)):
            data = b"\n".join(event.data).strip()
            if data == b"[DONE]" or (end not in (None, "close") and end in (event.name, data.decode(errors="replace"))):
                yield _END
                return
            bare = [line for line in event.other if line.startswith(b"{")]
            if bare or event.name == "error":
                raise self._failure(bare[0] if bare else data, "in its stream")
            if event.other:
                yield Reported(other=event.other)
            if data:  # servers send empty events to keep a connection open
                value = self.parse(data, halves=halves)
                if is_error(value):
                    raise self._failure(data, "in its stream")
                yield Reported(value)

    def _failure(self, data: bytes, where: str) -> AttemptError | Fault:
        """Make the error that a server reports after it has answered 200."""
        code, message = _reason(data)
        text = self._without_secrets(f"{self.url} reported an error {where}: {message}")
        failure = self._classify_status(_status_of(code), code, message, text, {})
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            failure.body = _decode(self._without_secrets(data.decode()))
        return failure

    def _check_end(self, headers: Mapping[str, str], end: str | None) -> None:
        """Raise unless a stream that ended without an end marker is known to be whole."""
        if end not in (None, "close"):
            raise AttemptError("bad_reply", f"the stream ended without {end!r} (target.stream_end)")
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        if end is None and not chunked and "content-length" not in headers:
            raise AttemptError(
                "bad_reply",
                "the stream ended with its connection; the response may be truncated",
                remedy="Serve it over HTTP/1.1 with chunks, end it with `data: [DONE]`, or name its last event as "
                "target.stream_end. `stream_end: close` accepts such a stream.",
                retry=False,
            )

    @staticmethod
    def parse(data: bytes, *, halves: bool = False) -> Any:
        """Parse JSON; raise an AttemptError that shows the data where it is none.

        Half a character, which JSON can write and no file can hold, is replaced; with `halves` it is kept.
        """
        data = data.removeprefix(BOM_UTF8)
        try:
            return _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if _HALF.search(data):
                import json  # which reads half characters, and few runs need

                with suppress(ValueError, RecursionError):
                    value = json.loads(data)
                    return value if halves else mend(value)
            text = data[:120].decode("utf-8", "replace")
            raise AttemptError("bad_reply", f"the reply is not JSON ({error}): {text!r}") from error

    def _classify_response(
        self, status: int, headers: Mapping[str, str], data: bytes, url: str | None = None
    ) -> AttemptError | Fault:
        code, message = _reason(data)
        text = self._without_secrets(f"{url or self.url} answered {status}: {message}")
        refusal = self._classify_status(status, code, message, text, headers)
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            refusal.body = _decode(self._without_secrets(data.decode()))
        if isinstance(refusal, AttemptError) and refusal.kind == "rate_limit" and refusal.retry_after is None:
            refusal.retry_after = limit_reset(headers, refusal.body)
        return refusal

    def _classify_status(
        self, status: int, code: str, message: str, text: str, headers: Mapping[str, str]
    ) -> AttemptError | Fault:
        if status in (401, 403):
            return Fault(
                "auth", text, status=status, remedy=self._key_hint or "Check the credentials, then run it again."
            )
        if status == 402 or code in ("insufficient_quota", "billing_hard_limit_reached", "quota_exceeded"):
            return Fault(
                "quota", text, status=status, remedy="Top up the account or wait for its quota, then run it again."
            )
        if status == 404:
            missing = "model" in message.lower() or "model" in code
            return Fault(
                "no_model",
                text,
                status=status,
                remedy=self._path_hint
                or (
                    "Check target.model: the server does not know it."
                    if missing
                    else "Check the URL (an OpenAI-compatible base_url usually ends in /v1) and the model's name."
                ),
            )
        if status == 429 or _is_overload(status, headers, f"{code} {message}"):
            return AttemptError("rate_limit", text, status=status, retry_after=retry_after(headers))
        if status < 400 or status in (408, 409, 425) or status >= 500 or code == "workflow_error":
            # A 422 with this code is anything that happens inside a workflow, a passing failure of its model included.
            return AttemptError("server", text, status=status, retry_after=retry_after(headers))
        return AttemptError("bad_request", text, status=status, retry=False)

    def _without_secrets(self, text: str) -> str:
        """Remove secrets from a message: some servers repeat the key that they refuse."""
        for value in (*self._secrets, *(self._signer.secrets if self._signer is not None else ())):
            text = text.replace(value, "(hidden)")
        return text

    def _classify_exception(self, error: BaseException) -> AttemptError | Fault:
        broken = self._classify(error)
        broken.message = self._without_secrets(broken.message)
        broken.remedy = broken.remedy and self._without_secrets(broken.remedy)
        return broken

    def _classify(self, error: BaseException) -> AttemptError | Fault:
        if isinstance(error, TooLong):
            return AttemptError(
                "bad_reply",
                f"{self.url}: {error} (limits.reply_bytes)",
                remedy="If such replies are wanted, raise limits.reply_bytes.",
                retry=False,
            )
        place = f"{urlsplit(self.url).hostname}:{urlsplit(self.url).port or 'default port'}"
        if isinstance(error, ssl.SSLCertVerificationError):
            return Fault("refused", f"{place}: the certificate is not trusted ({error})")
        if isinstance(error, socket.gaierror):
            return Fault("refused", f"{place}: no such host", remedy="Check the URL and the network.", away=True)
        if isinstance(error, ConnectionRefusedError):
            return Fault(
                "refused",
                f"{place} refuses connections",
                remedy=f"Is the server running at {self.url}? Start it, then run the same command again.",
                away=True,
            )
        return AttemptError("connection", f"{place}: {type(error).__name__}: {error}".rstrip(": "))


def _split(event: Event) -> list[Event]:
    """Split an event whose data is no JSON as a whole by its lines: some servers leave out the blank lines."""
    if len(event.data) > 1:
        try:
            _decode(b"\n".join(event.data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return [*(replace(event, data=(line,), other=()) for line in event.data), replace(event, name="", data=())]
    return [event]


def is_error(value: Any) -> bool:
    """Return True for an event or a reply that reports an error, in one of the shapes that servers use."""
    if not isinstance(value, dict):
        return False
    failed = bool(value.get("error")) or "error" in (value.get("type"), value.get("object"))
    return failed or value.get("code") == "workflow_error"


def _status_of(code: str) -> int:
    """Return the HTTP status that an error inside a stream would have had, as far as its code tells.

    Those that would stop a whole run are left out: a workflow may report a failure of something that it called.
    """
    if "rate_limit" in code.lower():
        return 429
    if code in ("400", "413", "422", "429", "invalid_request_error", "context_length_exceeded"):
        return int(code) if code.isdigit() else 400
    return 500


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Return what tells one server from another: scheme, host and port."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _proxy(url: str) -> str | None:
    """Return the environment's proxy for a URL, looked up once; aiohttp's `trust_env` looks it up for each request."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return None  # never through a proxy to this machine
    import urllib.request  # takes long to import

    if urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(parts.scheme)


def _reason(data: bytes) -> tuple[str, str]:
    """Return an error's code and message, from the shapes that servers use."""
    try:
        body = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", data[:300].decode("utf-8", "replace").strip() or "no reason given"
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or error
        return str(error.get("code") or error.get("type") or ""), str(message)[:300]
    return "", str(error)[:300]


def _is_overload(status: int, headers: Mapping[str, str], reason: str) -> bool:
    """Return True for a server that reports an overload, and is not broken."""
    if status == 503:
        return "overload" in reason.lower() or retry_after(headers) is not None
    return status == 529
