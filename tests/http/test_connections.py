"""HTTP as servers speak it: every form of a reply is read, broken ones are noticed, none reaches another request."""

from __future__ import annotations

import asyncio
import gzip
import select
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
import zlib
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from holdfast.errors import AttemptError, Fault
from holdfast.http.client import Client
from holdfast.http.connections import Connections
from holdfast.http.failures import Hints
from holdfast.http.response import REPLY_BYTES, BrokenReply
from holdfast.http.session import WebSession
from tests.support.workflow import Asked, workflow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine
    from pathlib import Path

    from holdfast.http.response import Response

BODY = b'{"answer": "two"}'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(autouse=True)
def trust(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reuse connections at once, as after the first replies of a server, except in tests of these."""
    if "probation" not in request.fixturenames:
        monkeypatch.setattr("holdfast.http.connections._PROBATION", 0)


@pytest.fixture
def probation() -> None:
    """Leave the first replies of a server under suspicion."""


class Script:
    """A server that sends given bytes for each request."""

    def __init__(self) -> None:
        self.url = ""
        self.client: Connections
        """with connections to it"""
        self.sent = 0
        self.replies: list[list[bytes]] = []
        """for each request, pieces that are sent one after the other; an empty piece ends the connection"""
        self.connections = 0
        self.requests: list[bytes] = []
        self.gate = asyncio.Event()
        """later pieces wait for it"""
        self.gate.set()
        self.asked = asyncio.Semaphore(0)
        """is released at each request"""
        self.lost = asyncio.Event()
        """a client has closed its connection"""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                self.asked.release()
                for piece in self.replies.pop(0):
                    if not piece:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await self.gate.wait()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(script: Script, serve: Any = None, secure: ssl.SSLContext | None = None) -> AsyncIterator[Script]:
    server = await asyncio.start_server(serve or script.serve, "127.0.0.1", 0, ssl=secure)
    script.url = f"{'http' if secure is None else 'https'}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/chat"
    script.client = Connections(script.url, {})
    try:
        yield script
    finally:
        await script.client.close()
        server.close()


@asynccontextmanager
async def scripted(*replies: list[bytes], secure: ssl.SSLContext | None = None) -> AsyncIterator[Script]:
    script = Script()
    script.replies = [*replies]
    async with serving(script, secure=secure):
        yield script


def post(script: Script, *, whole: bool = True) -> Coroutine[Any, Any, Response]:
    return script.client.request("POST", script.url, b"{}", None, whole=whole)


def read(*replies: list[bytes], whole: bool = True) -> list[bytes]:
    """The bodies of the replies to as many requests, one after the other."""

    async def ask() -> list[bytes]:
        async with scripted(*replies) as script:
            return [await (await post(script, whole=whole)).read() for _ in replies]

    return uvloop.run(ask())


def compressed(data: bytes, encoding: str) -> bytes:
    return HEAD + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n%b" % (encoding.encode(), len(data), data)


def bare_deflate(data: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-15)
    return deflater.compress(data) + deflater.flush()


REPLIES = {
    "a length": WHOLE,
    "chunks": CHUNKED + b"5\r\n" + BODY[:5] + b"\r\nc;name=value\r\n" + BODY[5:] + b"\r\n0\r\n\r\n",
    "chunks and trailers": CHUNKED + b"11\r\n" + BODY + b"\r\n0\r\nServer-Timing: 1\r\nX: y\r\n\r\n",
    "a preliminary head": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + WHOLE,
    "names in capitals": WHOLE.replace(b"Content-Length", b"CONTENT-LENGTH"),
    "no reason": WHOLE.replace(b"200 OK", b"200"),
    "gzip": compressed(gzip.compress(BODY), "gzip"),
    "deflate": compressed(zlib.compress(BODY), "deflate"),
    "deflate without its header": compressed(bare_deflate(BODY), "deflate"),
}


@pytest.mark.parametrize("form", REPLIES)
@pytest.mark.parametrize("whole", [True, False])
def test_a_reply_is_read_in_every_form_and_the_connection_is_used_again(form: str, whole: bool) -> None:
    reply = REPLIES[form]
    assert read([reply], [reply], whole=whole) == [BODY, BODY]


@pytest.mark.parametrize("form", REPLIES)
async def test_a_reply_may_be_cut_into_packets_anywhere(form: str) -> None:
    reply = REPLIES[form]
    async with scripted() as script:
        for place in range(1, len(reply)):
            script.replies.append([reply[:place], reply[place:]])
            script.gate.clear()
            asked = asyncio.create_task(post(script))
            await script.asked.acquire()
            script.gate.set()
            assert await (await asked).read() == BODY
        assert script.connections == 1


def test_a_reply_without_a_length_ends_with_its_connection() -> None:
    reply = HEAD + b"\r\n" + BODY
    assert read([reply, b""], [WHOLE]) == [BODY, BODY]


BROKEN = {
    "nothing": [b""],
    "half a head": [HEAD, b""],
    "half a body": [WHOLE[:-3], b""],
    "half a chunk": [CHUNKED + b"11\r\n" + BODY[:5], b""],
    "no last chunk": [CHUNKED + b"11\r\n" + BODY + b"\r\n", b""],
    "an unknown compression": [compressed(BODY, "br")],
    "not compressed at all": [compressed(BODY, "gzip")],
    "lines without carriage returns": [WHOLE.replace(b"\r\n", b"\n")],
    "a header over two lines": [HEAD + b"X-Long: a\r\n b\r\n\r\n"],
    "not HTTP": [b"SSH-2.0-OpenSSH_9.6\r\n\r\n"],
    "no number as its length": [HEAD + b"Content-Length: -5\r\n\r\n"],
    "no number as the size of a chunk": [CHUNKED + b"0x5\r\nhello\r\n"],
    "a chunk longer than announced": [CHUNKED + b"3\r\nhello\r\n0\r\n\r\n"],
    "a head without an end": [HEAD + b"X-Filler: " + b"x" * (1 << 18)],
}


@pytest.mark.parametrize("form", BROKEN)
@pytest.mark.parametrize("whole", [True, False])
async def test_a_broken_reply_is_an_error_and_the_next_request_has_a_new_connection(form: str, whole: bool) -> None:
    async with scripted(BROKEN[form], [WHOLE]) as script:
        with pytest.raises(BrokenReply):
            await (await post(script, whole=whole)).read()
        answer = await post(script, whole=whole)
        assert await answer.read() == BODY and script.connections == 2


@pytest.mark.parametrize("whole", [True, False])
def test_a_compressed_reply_that_ended_early_is_an_error(whole: bool) -> None:
    with pytest.raises(BrokenReply, match="ended early"):
        read([compressed(gzip.compress(BODY)[:20], "gzip")], whole=whole)


AFTERWARDS = {
    "is kept": ([WHOLE], 1),
    "is closed where the server says so": ([WHOLE.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)], 2),
    "is closed by HTTP/1.0": ([WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0")], 2),
    "is closed after more than was announced": ([WHOLE + b"HTTP/1.1 200 OK\r\n"], 2),
}


@pytest.mark.parametrize("how", AFTERWARDS)
async def test_a_connection_after_its_reply(how: str) -> None:
    reply, expected = AFTERWARDS[how]
    async with scripted(reply, [WHOLE]) as script:
        for _ in range(2):
            assert await (await post(script)).read() == BODY
        assert script.connections == expected


async def test_the_late_reply_of_a_request_that_was_given_up_reaches_no_other_request() -> None:
    late = WHOLE.replace(b"two", b"old")
    async with scripted([late[:20], late[20:]], [WHOLE]) as script:
        script.gate.clear()
        asked = asyncio.create_task(post(script))
        await script.asked.acquire()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        script.gate.set()
        assert await (await post(script)).read() == BODY


async def test_a_stream_that_is_not_read_to_its_end_closes_its_connection() -> None:
    events = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with scripted([events + b'f\r\ndata: {"n": 1}\n\r\n1\r\n\n\r\n', b"1"]) as script:
        script.gate.clear()
        async with Client(script.url, {}) as client:
            stream = client.events({})
            assert (await anext(stream)).value == {"n": 1}
            await stream.aclose()
            script.gate.set()
            await script.lost.wait()


def posted(url: str, headers: dict[str, str] | None = None) -> Any:
    async def ask() -> Any:
        async with Client(url, headers or {}) as client:
            return [await client.post({"q": 1}), await client.get("page=2")]

    return uvloop.run(ask())


async def test_headers_credentials_and_the_path_reach_the_server() -> None:
    async with scripted([WHOLE], [WHOLE]) as script:
        url = script.url.replace("//", "//me:p%40ss@").replace("/v1/chat", "/v1/ä b%2F?key=c d")
        async with Client(url, {"X-Mine": "yes", "user-agent": "other"}) as client:
            await client.post({"q": 1})
            await client.get("page=2")
        post, get = script.requests
        assert post.startswith(b"POST /v1/%C3%A4%20b%2F?key=c%20d HTTP/1.1\r\n") and post.endswith(b'{"q":1}')
        assert get.startswith(b"GET /v1/%C3%A4%20b%2F?page=2 HTTP/1.1\r\n")
        for request in script.requests:
            lines = request.split(b"\r\n")
            assert {b"x-mine: yes", b"authorization: Basic bWU6cEBzcw==", b"user-agent: other"} <= {*lines}
            assert f"host: 127.0.0.1:{script.url.split(':')[2].split('/')[0]}".encode() in lines


def test_a_line_break_in_a_header_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(Fault, match="line break"):
        posted("http://127.0.0.1:1", {"Authorization": "Bearer x\r\nHost: other"})


def moved(to: str, status: int = 307) -> bytes:
    return f"HTTP/1.1 {status} Moved\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_on_the_same_server_is_followed_with_the_same_request(status: int) -> None:
    async with (
        scripted([moved("/new?a=b", status)], [WHOLE]) as script,
        Client(script.url, {"X-Key": "k"}) as client,
    ):
        assert await client.post({"q": 1}) == {"answer": "two"}
        first, second = script.requests
        method, body = (b"GET", b"") if status == 303 else (b"POST", b'{"q":1}')
        assert second.startswith(method + b" /new?a=b HTTP/1.1\r\n") and b"x-key: k" in second
        assert first.endswith(b'\r\n\r\n{"q":1}') and second.endswith(b"\r\n\r\n" + body)


@pytest.mark.parametrize("form", ["another port", "another host", "another scheme", "a file", "no address"])
async def test_a_redirect_to_another_server_stops_the_run_and_names_it(form: str) -> None:
    with workflow(lambda _: {"answer": "stolen"}) as other:
        async with scripted() as script:
            places = {
                "another port": f"{other.url}/v1",
                "another host": script.url.replace("127.0.0.1", "localhost"),
                "another scheme": script.url.replace("http:", "https:"),
                "a file": "file:///etc/passwd",
                "no address": "http://[::1",
            }
            script.replies.append([moved(places[form])])
            async with Client(script.url, {"X-Api-Key": "sk-secret-123456"}) as client:
                with pytest.raises(Fault, match="redirects to another server") as stopped:
                    await client.post({"q": "a prompt"})
        assert places[form] in stopped.value.message and "trust that server" in (stopped.value.remedy or "")
        assert other.asked == []


async def test_redirects_that_do_not_end_are_an_error() -> None:
    async with scripted(*[[moved("/again")]] * 6) as script, Client(script.url, {}) as client:
        with pytest.raises(AttemptError, match="redirects more than 5 times") as failed:
            await client.post({})
        assert not failed.value.retry and len(script.requests) == 6


def test_a_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(one: Asked) -> Any:
        return {"path": one.path}

    with workflow(answer) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)

        async def ask() -> Any:
            async with Client("http://models.example/v1", {}) as client:
                return await client.post({"q": 1})

        assert uvloop.run(ask()) == {"path": "http://models.example/v1"}


@pytest.mark.parametrize(
    ("url", "message"),
    [("http://nowhere.invalid/v1", "no such host"), ("http://127.0.0.1:99999/v1", "Port out of range")],
)
def test_a_server_that_cannot_be_reached_is_reported(url: str, message: str) -> None:
    with pytest.raises(Fault, match=message):
        posted(url)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of this machine, signed by nobody, and its key."""
    path = tmp_path / "certificate.pem"
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(path), "-out", str(tmp_path / "public.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *named, *files]
    subprocess.run(command, check=True, capture_output=True)
    with path.open("ab") as file:
        file.write((tmp_path / "public.pem").read_bytes())
    return path


async def test_a_certificate_is_checked(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(certificate)
    async with scripted([WHOLE], [WHOLE], secure=secure) as script:
        async with Client(script.url, {}) as client:
            with pytest.raises(Fault, match="certificate is not trusted"):
                await client.post({})
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_name("public.pem")))
        async with Client(script.url, {}) as client:
            assert await client.post({}) == await client.post({}) == {"answer": "two"}
        assert script.connections == 1


def test_tickets_of_a_tls_server_are_no_replies(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come right after the handshake: while this process is busy, before the request is written."""
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_name("public.pem")))
    count = 24

    class Answering(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with secure.wrap_socket(self.request, server_side=True) as connection:
                connection.recv(65536)
                connection.sendall(WHOLE)
                connection.recv(65536)  # until the client closes it

    async def ask(url: str) -> None:
        async with Client(url, {}) as client:
            asking = [asyncio.ensure_future(client.post({})) for _ in range(count)]
            while not all(each.done() for each in asking):
                time.sleep(0.02)  # noqa: ASYNC251 - the loop is busy
                await asyncio.sleep(0)
            assert [await each for each in asking] == [{"answer": "two"}] * count

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            uvloop.run(ask(f"https://127.0.0.1:{server.server_address[1]}/v1/chat"))
        finally:
            server.shutdown()


async def test_a_request_that_is_given_up_before_it_is_written_is_not_sent_and_holds_up_no_other() -> None:
    async with scripted([WHOLE], [WHOLE], [WHOLE]) as script, asyncio.timeout(30):
        await asyncio.gather(post(script), post(script))  # two connections wait now
        given_up = post(script)
        given_up.send(None)
        given_up.close()
        assert await (await post(script)).read() == BODY
        assert len(script.requests) == 3


async def test_a_reply_that_came_before_its_request_was_written_is_refused() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        connections = Connections(url, {})

        def ask_once() -> Coroutine[Any, Any, Response]:
            return connections.request("POST", url, b"{}", None, whole=True)

        async def accept() -> socket.socket:
            accepted, _ = await loop.sock_accept(listener)
            accepted.setblocking(False)
            assert await loop.sock_recv(accepted, 1 << 16)
            return accepted

        async with asyncio.timeout(30):
            first = asyncio.create_task(ask_once())
            with await accept() as early:
                early.sendall(WHOLE)
                await first
                early.sendall(WHOLE)  # unasked for, and there before the next request can be written
                last = asyncio.create_task(ask_once())
                with await accept() as late:
                    late.sendall(WHOLE.replace(b"two", b"six"))
                    assert await (await last).read() == BODY.replace(b"two", b"six")
                assert await loop.sock_recv(early, 1 << 16) == b""
        assert connections.strayed
        await connections.close()


async def test_the_first_of_many_requests_are_written_before_the_last_are_sent() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as accepted:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        connections = Connections(url, {})

        def send() -> Coroutine[Any, Any, Response]:
            return connections.request("POST", url, b"{}", None, whole=True)

        requests = [send() for _ in range(20)]
        async with asyncio.timeout(30):
            first = [asyncio.create_task(send()) for _ in requests]
            servers = [accepted.enter_context((await loop.sock_accept(listener))[0]) for _ in requests]
            for server in servers:
                server.setblocking(False)
                assert await loop.sock_recv(server, 1 << 16)
                server.sendall(WHOLE)
            await asyncio.gather(*first)
        for request in requests:
            request.send(None)  # the event loop has no turn in between
        arrived = select.select(servers, [], [], 0)[0]
        for request in requests:
            request.close()
        await connections.close()
        assert len(arrived) == 16


STRAY = WHOLE.replace(b"two", b"bad")


@asynccontextmanager
async def straying(delay: float) -> AsyncIterator[Script]:
    """A server that takes a moment to answer, and some time after an answer sends another one that nobody asked for."""
    script = Script()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script.connections += 1
        loop = asyncio.get_running_loop()
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                script.requests.append(await reader.readexactly(length))
                await asyncio.sleep(2 * delay)
                writer.write(WHOLE)
                loop.call_later(delay, writer.write, STRAY)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with serving(script, serve):
        yield script


@pytest.mark.parametrize("delay", [0.01, 0.1])
@pytest.mark.usefixtures("probation")
async def test_the_late_stray_replies_of_a_server_become_no_answers(delay: float) -> None:
    async with straying(delay) as script, Client(script.url, {}) as client:

        async def in_turn() -> list[Any]:
            return [await client.post({"q": number}) for number in range(6)]

        for answers in await asyncio.gather(in_turn(), in_turn()):
            assert answers == [{"answer": "two"}] * 6
        assert len(script.requests) == script.connections == 12
        assert "no request had asked for" in client.notices[0] and script.url in client.notices[0]


@pytest.mark.usefixtures("probation")
async def test_connections_of_a_sound_server_are_reused() -> None:
    async with scripted(*[[WHOLE]] * 60) as script:
        for _ in range(60):
            await post(script)
        assert script.connections <= 33 and not script.client.strayed


UNASKED = {
    "a reply": (STRAY, True),
    "a time-out, before the server closes the connection": (b"HTTP/1.1 408 Request Timeout\r\n\r\n", False),
    "an empty line": (b"\r\n", False),
}


@pytest.mark.parametrize("form", UNASKED)
async def test_an_idle_connection_that_gets_anything_is_closed(form: str) -> None:
    data, strays = UNASKED[form]
    async with scripted([WHOLE, data], [WHOLE], [WHOLE]) as script, asyncio.timeout(30):
        script.gate.clear()
        await post(script)
        script.gate.set()
        await script.lost.wait()
        for _ in range(2):
            assert await (await post(script)).read() == BODY
        assert script.client.strayed is strays and script.connections == (3 if strays else 2)


LIMIT = 1_000_000
ENDLESS = {
    "a body": HEAD + b"Content-Length: 99999999999\r\n\r\n",
    "a body without a length": HEAD + b"\r\n",
    "an error": HEAD.replace(b"200 OK", b"500 Oops") + b"\r\n",
    "a stream": HEAD.replace(b"application/json", b"text/event-stream") + b"\r\n",
}
NEVER_ENDING = {name: (head, b"data: 1\n" * 8192) for name, head in ENDLESS.items()} | {
    "a body in small chunks": (CHUNKED, b"2\r\nxx\r\n" * 8192),
    "extensions of chunks": (CHUNKED, b"1;" + b"x" * 5000 + b"\r\nx\r\n"),
    "garbage after compressed data": (HEAD + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(BODY), b"x" * 65536),
}


@asynccontextmanager
async def endless(head: bytes, piece: bytes) -> AsyncIterator[Script]:
    """A server that sends the same piece again and again, as long as anybody reads."""
    script = Script()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        try:
            while True:
                writer.write(piece)
                await writer.drain()
                script.sent += len(piece)
        except ConnectionError:
            writer.close()
            script.lost.set()

    async with serving(script, serve):
        yield script


async def read_stream(client: Client) -> None:
    async for _ in client.events({}):
        pass


@pytest.mark.parametrize("form", NEVER_ENDING)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_reply_that_does_not_end_is_an_error_after_so_many_bytes(form: str, streams: bool) -> None:
    REPLY_BYTES.set(LIMIT)
    hints = Hints(size="Raise the limit.")
    async with (
        endless(*NEVER_ENDING[form]) as script,
        asyncio.timeout(60),
        Client(script.url, {}, hints=hints) as client,
    ):
        with pytest.raises(AttemptError, match="more than 1,000,000 bytes") as failed:
            await (read_stream(client) if streams else client.post({}))
        assert failed.value.kind == "bad_reply" and not failed.value.retry
        assert failed.value.remedy == "Raise the limit."
        await script.lost.wait()


@pytest.mark.parametrize("piece", [b"X-%d: y\r\n", b"X: y\r\n"])
async def test_headers_that_do_not_end_are_an_error(piece: bytes) -> None:
    lines = b"".join(piece % number if b"%" in piece else piece for number in range(100_000))
    async with endless(HEAD, lines) as script, asyncio.timeout(60), Client(script.url, {}) as client:
        with pytest.raises(AttemptError, match="header"):
            await client.post({})


def bomb(megabytes: int) -> bytes:
    """A thousandth of so many megabytes: compressed zeros, inside a JSON text."""
    packer = zlib.compressobj(9, wbits=31)
    parts = [packer.compress(b'{"answer": "'), *(packer.compress(bytes(1_000_000)) for _ in range(megabytes))]
    return b"".join([*parts, packer.compress(b'"}'), packer.flush()])


def memory() -> int:
    """The resident bytes of this process."""
    with open("/proc/self/statm") as file:  # noqa: PTH123 - not a file
        return int(file.read().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is measured by /proc")
@pytest.mark.parametrize("through", ["connections", "a session"])
async def test_a_small_reply_that_decompresses_to_a_gigabyte_takes_little_memory_and_holds_up_nobody(
    through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = bomb(1000)
    other = compressed(gzip.compress(BODY), "gzip")
    async with scripted([compressed(packed, "gzip")]) as hostile, scripted(*[[other]] * 50) as sound:
        if through == "a session":
            monkeypatch.setattr("holdfast.http.client.proxy_of", lambda _: "")
            monkeypatch.setattr("holdfast.http.session.WebSession.__init__", without_proxy)
        async with Client(hostile.url, {}) as client, Client(sound.url, {}) as others:
            before, answered = memory(), 0
            attack = asyncio.create_task(client.post({}))
            while not attack.done():
                if answered < 50:
                    assert await others.post({}) == {"answer": "two"}
                    answered += 1
                await asyncio.sleep(0)
            with pytest.raises(AttemptError, match="more than 64,000,000 bytes"):
                attack.result()
            assert answered == 50
            assert memory() - before < 300_000_000


def without_proxy(self: Any, headers: Any, _: Any, made: Any = WebSession.__init__) -> None:
    made(self, headers, None)


async def test_a_server_waits_while_nobody_reads_its_stream() -> None:
    head, piece = NEVER_ENDING["a stream"]
    async with endless(head, piece) as script, asyncio.timeout(60):
        response = await post(script, whole=False)
        sent = -1
        while script.sent > sent:
            sent = script.sent
            await asyncio.sleep(0.1)
        assert sent < 60_000_000
        total = 0
        async for part in response.pieces():
            total += len(part)
            if total > sent + 10_000_000:  # reading goes on where it stopped
                break
        response.close()


async def test_a_stray_reply_that_nobody_has_read_yet_is_noticed_before_a_request_is_written() -> None:
    """Eight requests of one iteration are written before the event loop looks at what has arrived."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n{}")
                writer.write(WHOLE)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    connections = Connections(url, {})

    async def ask_eight_times() -> list[bytes]:
        requests = [connections.request("POST", url, b"{}", None, whole=True) for _ in range(8)]
        return [await response.read() for response in await asyncio.gather(*requests)]

    async with asyncio.timeout(30):
        assert await ask_eight_times() == [BODY] * 8
        for writer in writers:
            writer.write(STRAY)  # sent at once by this kind of event loop
        assert await ask_eight_times() == [BODY] * 8
    assert len(writers) == 16 and connections.strayed
    await connections.close()
    server.close()
