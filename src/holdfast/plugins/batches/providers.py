"""The APIs of batches: OpenAI's, which Azure, Groq and others have too, Together's variant of it, and Anthropic's.

They take many requests at once, each with a `custom_id`, answer them within a day, and return a file with a line for
each. The `custom_id` is the request's name, `<trial's key>-<request's digest>`, followed by the first digits of the
intent, so that a result shows which batch it belongs to.

A model that the user runs without a server has batches as files, for `vllm run-batch -i REQUESTS -o ANSWERS`: a file of
requests in OpenAI's format, whose answers are expected in a second file, a line for each request. Removing the file of
requests cancels the batch.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import time
from codecs import BOM_UTF8
from contextlib import suppress
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from holdfast import AttemptError
from holdfast.errors import Fault
from holdfast.http.response import parse
from holdfast.plugins.batches.ledger import result_lines
from holdfast.spec.schema import is_embedded
from holdfast.store.files import advice_for, make_directory, replacing, sync_directory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable
    from pathlib import Path

    from holdfast.http.client import Client
    from holdfast.plugins.batches.ledger import Batch
    from holdfast.spec.providers import ModelEndpoint
    from holdfast.spec.schema import Api
    from holdfast.spec.target_schema import BatchBlock

FILES: Final = "files|"
"""stands for the account of batches that are files, in the ledger"""
_SKEW_SECONDS: Final = 900.0
"""by which the provider's clock may differ from ours"""
_FILE_SECONDS: Final = 600.0
"""that a provider may take to read an uploaded file"""
_NOT_RUN: Final = ("batch_expired", "batch_cancelled", "batch_canceled")
_MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, ValueError)
_decoder: Final = msgspec.json.Decoder()


class BatchProblem(NamedTuple):
    """Why a provider refused a whole batch."""

    code: str
    message: str
    lines: tuple[int, ...] = ()
    """the requests that are wrong, from 0; empty: it concerns all"""

    @property
    def full(self) -> bool:
        """True if the batch would be accepted once others have ended."""
        return self.code in ("token_limit_exceeded", "rate_limit_exceeded", "too_many_batches")


class Look(NamedTuple):
    """A batch as its provider describes it."""

    id: str
    status: str
    done: int
    total: int
    ended: bool
    files: tuple[str, ...] = ()
    """URLs of the results"""
    problem: BatchProblem | None = None
    results: int | None = None
    """how many requests have a result, as the provider counts them; None if it does not"""

    @property
    def cancelled(self) -> bool:
        """True if somebody cancelled it."""
        return self.status in ("cancelled", "canceled")


class BatchResult(NamedTuple):
    """The result of one request. All three are None or empty for a request that was not run."""

    custom_id: str
    reply: Any = None
    error: AttemptError | Fault | None = None
    run: bool = True


class BatchApi:
    """The form of a provider's batches."""

    most_requests: ClassVar[int] = 50_000
    most_bytes: ClassVar[int] = 200_000_000
    uploads: ClassVar[bool] = True
    """requests are uploaded as a file first"""
    verb: ClassVar[str] = "submitted"
    """how a batch was sent, for messages"""
    next_page: ClassVar[str] = "after"
    """parameter that names the last batch of the page before"""
    head: ClassVar[bytes] = b""
    between: ClassVar[bytes] = b"\n"
    tail: ClassVar[bytes] = b"\n"

    def __init__(self, client: Client, base_url: str, path: str) -> None:
        """`base_url` and `path` as for single requests."""
        self._client = client
        self._base = base_url
        self._path = path

    def line(self, custom_id: str, body: bytes) -> bytes:
        """Return a request as it stands in the file."""
        raise NotImplementedError

    def write(self, file: Path, lines: Iterable[bytes]) -> str:
        """Write the file of requests, and return its digest."""
        digest = sha256()
        with file.open("wb") as target:
            for number, line in enumerate(lines):
                piece = (self.between if number else self.head) + line
                digest.update(piece)
                target.write(piece)
            digest.update(self.tail)
            target.write(self.tail)
        return f"sha256:{digest.hexdigest()[:32]}"

    async def upload(self, file: Path, intent: str) -> str:
        """Upload the file of requests, and return its id."""
        raise NotImplementedError

    async def submit(self, file: Path, uploaded: str | None, intent: str) -> str:
        """Submit a batch, and return its id."""
        raise NotImplementedError

    def advice(self, batch: str) -> str:
        """Return what the user has to do about a batch that is under way; empty if nothing."""
        return ""

    @property
    def _url(self) -> str:
        """The URL of the account's batches."""
        return f"{self._base}/batches"

    async def look(self, batch: str) -> Look:
        """Return the state of a batch."""
        return self._look(await self._json("GET", f"{self._url}/{batch}"))

    async def find(self, batch: Batch, others: Collection[str]) -> Look | bool:
        """Return a batch that may have been submitted; False if it was not, True if that is unknown.

        `others` are the ids of batches of other intents.
        """
        raise NotImplementedError

    async def cancel(self, batch: str) -> None:
        """Cancel a batch. What it has answered by then is still in its results."""
        await self._json("POST", f"{self._url}/{batch}/cancel", {})

    async def _list(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the account's batches, the newest first."""
        query = "?limit=100"
        while query:
            page = await self._json("GET", self._url + query)
            batches = page if isinstance(page, list) else page.get("data") or []
            for each in sorted(batches, key=lambda batch: _seconds(batch.get("created_at")), reverse=True):
                yield each
            more = isinstance(page, dict) and page.get("has_more") and batches
            query = f"?limit=100&{self.next_page}={batches[-1]['id']}" if more else ""

    def read(self, line: bytes) -> BatchResult | None:
        """Read a line of results; None for any other line."""
        try:
            return self._result(_decode(line))
        except _MALFORMED:
            return None

    def _result(self, value: Any) -> BatchResult:
        """Return the result in a line; any error of reading it means that the line is another one."""
        raise NotImplementedError

    def _look(self, answer: Any) -> Look:
        try:
            return self._description(answer)
        except _MALFORMED as error:
            raise AttemptError("bad_reply", f"not the description of a batch: {str(answer)[:200]}") from error

    def _description(self, batch: Any) -> Look:
        """Return the state of a batch as the provider describes it."""
        raise NotImplementedError

    async def download(self, look: Look, path: Path) -> None:
        """Store the results of a batch."""
        with replacing(path) as file:
            for url in look.files:
                async with self._client.call("GET", url) as response:
                    async for chunk in response.pieces(endless=True):
                        _write(file, chunk)
                _write(file, b"\n")  # which ends a last line that the provider did not end

    async def _json(self, method: str, url: str, body: Any = None) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        async with self._client.call(method, url, data) as response:
            return parse(await response.read())


def _write(file: BinaryIO, data: bytes) -> None:
    try:
        file.write(data)
    except OSError as error:  # which is not a failure of the connection
        raise Fault("disk", f"cannot store the results of a batch: {error}", remedy=advice_for(error)) from error


class OpenAIBatches(BatchApi):
    """Files, and batches made of them."""

    has_metadata: ClassVar[bool] = True
    """else a batch is found again by its file"""

    def line(self, custom_id: str, body: bytes) -> bytes:
        """Return the request with its method and path."""
        url = msgspec.json.encode(f"/v1{self._path}")
        return b'{"custom_id":"%b","method":"POST","url":%b,"body":%b}' % (custom_id.encode(), url, body)

    async def upload(self, file: Path, intent: str) -> str:
        """Upload the file, and wait until the provider has read it."""
        return await self._upload(file, f"holdfast-{intent}.jsonl", "/files", {"purpose": "batch"})

    async def _upload(self, file: Path, name: str, path: str, fields: dict[str, str]) -> str:
        with file.open("rb") as content:
            data, content_type = self._client.form(fields, content, name)
            async with self._client.call("POST", self._base + path, data, content_type) as response:
                stored = parse(await response.read())
        deadline = time.monotonic() + _FILE_SECONDS
        while stored.get("status") in ("pending", "running") and time.monotonic() < deadline:  # as Azure's files are
            await asyncio.sleep(1)
            stored = await self._json("GET", f"{self._base}/files/{stored['id']}")
        return str(stored["id"])

    async def submit(self, file: Path, uploaded: str | None, intent: str) -> str:
        """Create the batch, with the intent in its metadata."""
        body: dict[str, Any] = {"input_file_id": uploaded, "endpoint": f"/v1{self._path}", "completion_window": "24h"}
        if self.has_metadata:
            body["metadata"] = {"holdfast": intent}
        return self._look(await self._json("POST", self._url, body)).id

    def _description(self, batch: Any) -> Look:
        batch = batch.get("job", batch)  # Together wraps a batch that it has created
        status = str(batch["status"]).lower()
        counts = batch.get("request_counts") or {}
        files = [batch.get("output_file_id"), batch.get("error_file_id")]
        done = int(counts.get("completed") or 0) + int(counts.get("failed") or 0)
        return Look(
            id=str(batch["id"]),
            status=status,
            done=done,
            total=int(counts.get("total") or 0),
            ended=status in ("completed", "failed", "expired", "cancelled", "canceled"),
            files=tuple(f"{self._base}/files/{file}/content" for file in files if file),
            problem=_problem(batch) if status == "failed" else None,
            results=done,
        )

    async def find(self, batch: Batch, others: Collection[str]) -> Look | bool:
        """Look for the uploaded file, or the intent in the metadata."""
        async for each in self._list():
            named = (each.get("metadata") or {}).get("holdfast") == batch.intent.intent
            if named or (batch.file is not None and each.get("input_file_id") == batch.file):
                return self._look(each)
            if _seconds(each.get("created_at")) < batch.intent.time - _SKEW_SECONDS:
                break
        return False

    def _result(self, value: Any) -> BatchResult:
        custom_id, response, error = value["custom_id"], value.get("response"), value.get("error") or {}
        if isinstance(error, dict) and error.get("code") in _NOT_RUN:
            return BatchResult(custom_id, run=False)
        if response:
            status, body = int(response.get("status_code") or 200), response.get("body")
            if status < 300:
                return BatchResult(custom_id, body)
            whole = isinstance(error, dict) and "error" in error
            reason = body or (error if whole else {"error": error})  # vLLM has no body there
            return BatchResult(custom_id, error=self._client.refusal(status, msgspec.json.encode(reason)))
        return BatchResult(custom_id, error=self._client.refusal(500, msgspec.json.encode({"error": error})))


class TogetherBatches(OpenAIBatches):
    """Together's variant: another way to upload, no metadata, and progress as a share."""

    most_bytes: ClassVar[int] = 100_000_000
    has_metadata: ClassVar[bool] = False

    def line(self, custom_id: str, body: bytes) -> bytes:
        return b'{"custom_id":"%b","body":%b}' % (custom_id.encode(), body)

    async def upload(self, file: Path, intent: str) -> str:
        """Upload the file for this purpose, which has a name of its own."""
        name = f"holdfast-{intent}.jsonl"
        return await self._upload(file, name, "/files/upload", {"purpose": "batch-api", "file_name": name})

    def _description(self, batch: Any) -> Look:
        look = super()._description(batch)
        return look._replace(done=round(batch.get("job", batch).get("progress") or 0), total=100, results=None)


def _problem(batch: dict[str, Any]) -> BatchProblem:
    errors = batch.get("errors") or {}
    data = (errors.get("data") if isinstance(errors, dict) else errors) or [{"message": batch.get("error")}]
    lines = tuple(each["line"] - 1 for each in data if isinstance(each.get("line"), int))
    first = data[0]
    return BatchProblem(str(first.get("code") or ""), str(first.get("message") or "no reason given"), lines)


_STATUS: Final = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "overloaded_error": 529,
}
"""of Anthropic's errors; others are failures of the server"""


class AnthropicBatches(BatchApi):
    """Message batches, submitted whole. They carry no name of ours but in the `custom_id` of their requests."""

    most_requests: ClassVar[int] = 100_000
    most_bytes: ClassVar[int] = 250_000_000
    uploads: ClassVar[bool] = False
    next_page: ClassVar[str] = "after_id"
    head: ClassVar[bytes] = b'{"requests":['
    between: ClassVar[bytes] = b",\n"
    tail: ClassVar[bytes] = b"]}"

    @property
    def _url(self) -> str:
        return f"{self._base}{self._path}/batches"

    def line(self, custom_id: str, body: bytes) -> bytes:
        return b'{"custom_id":"%b","params":%b}' % (custom_id.encode(), body)

    async def submit(self, file: Path, uploaded: str | None, intent: str) -> str:
        """Create the batch."""
        with file.open("rb") as content:
            async with self._client.call("POST", self._url, content) as response:
                return self._look(parse(await response.read())).id

    def _description(self, batch: Any) -> Look:
        counts = dict(batch["request_counts"])
        ended = batch["processing_status"] == "ended"
        status = str(batch["processing_status"])
        if ended and batch.get("cancel_initiated_at"):
            status = "cancelled"
        elif ended and counts.get("expired"):
            status = "expired"
        return Look(
            id=str(batch["id"]),
            status=status,
            done=sum(counts.values()) - counts.get("processing", 0),
            total=sum(counts.values()),
            ended=ended,
            files=(f"{self._url}/{batch['id']}/results",) if ended else (),
            results=sum(counts.values()) if ended else None,
        )

    async def find(self, batch: Batch, others: Collection[str]) -> Look | bool:
        """Look among batches of the same time and size for one whose results carry the intent.

        A batch has no results before it has ended; until then its owner is unknown.
        """
        unknown = False
        async for each in self._list():
            if _seconds(each.get("created_at")) < batch.intent.time - _SKEW_SECONDS:
                break
            look = self._look(each)
            if look.id in others or look.total != len(batch.intent.requests):
                continue
            if not look.ended:
                unknown = True
            elif await self._carries(look, batch.intent.intent):
                return look
        return unknown

    async def _carries(self, look: Look, intent: str) -> bool:
        """Return True if the first result of a batch is one of an intent."""
        async with self._client.call("GET", look.files[0]) as response:
            first = self.read((await response.line()).strip())
        return first is not None and first.custom_id.endswith(f"-{intent[:8]}")

    def _result(self, value: Any) -> BatchResult:
        custom_id, result = value["custom_id"], value["result"]
        if result["type"] == "succeeded":
            return BatchResult(custom_id, result["message"])
        if result["type"] in ("expired", "canceled"):
            return BatchResult(custom_id, run=False)
        error = result["error"]
        kind = (error.get("error") or error).get("type")
        return BatchResult(custom_id, error=self._client.refusal(_STATUS.get(kind, 500), msgspec.json.encode(error)))


def _decode(line: bytes) -> Any:
    return _decoder.decode(line.removeprefix(BOM_UTF8))


def _seconds(moment: Any) -> float:
    """Return a time that a provider gives as a number or in words; infinity if it cannot be read."""
    if isinstance(moment, int | float):
        return float(moment)
    try:
        return datetime.fromisoformat(str(moment)).timestamp()
    except ValueError:
        return float("inf")


def glance(line: bytes) -> tuple[str, bool] | None:
    """Return the `custom_id` of a line of results and whether it is an answer, whichever API it is of."""
    try:
        value = _decode(line)
        result, response = value.get("result"), value.get("response")
        if result is not None:
            return str(value["custom_id"]), result["type"] == "succeeded"
        answered = bool(response) and not value.get("error") and int(response.get("status_code") or 200) < 300
        return str(value["custom_id"]), answered
    except _MALFORMED:
        return None


def same_answers(lines: Iterable[bytes]) -> bool:
    """Return True if lines of results hold the same answer, whichever API they are of."""
    answers = []
    for line in lines:
        value = _decode(line)
        reply = (value.get("result") or {}).get("message") or (value.get("response") or {}).get("body")
        answers.append({**reply, "id": None, "created": None} if isinstance(reply, dict) else reply)
    return all(answer == answers[0] for answer in answers)


class FileBatches(OpenAIBatches):
    """Files of requests that somebody answers."""

    verb: ClassVar[str] = "wrote"

    def __init__(self, client: Client, folder: Path, path: str) -> None:
        super().__init__(client, "", path)
        self._folder = folder

    async def upload(self, file: Path, intent: str) -> str:
        """Store the requests under a hidden name."""
        await asyncio.to_thread(self._stage, file, intent)
        return intent

    def _stage(self, file: Path, intent: str) -> None:
        make_directory(self._folder)
        with file.open("rb") as source, replacing(self._staged(intent)) as target:
            shutil.copyfileobj(source, target, 1 << 20)

    def _staged(self, intent: str) -> Path:
        return self._folder / f".{intent}.staged"

    async def submit(self, file: Path, uploaded: str | None, intent: str) -> str:
        """Show the requests under their name."""
        self._staged(intent).replace(requests_of(self._folder, intent))
        sync_directory(self._folder)
        return intent

    def advice(self, batch: str) -> str:
        """Return the command that answers the batch."""
        return f"; answer it with: {answer_command(self._folder, batch)}"

    async def look(self, batch: str) -> Look:
        """Count the answers. A file that is still being written has fewer lines than requests."""
        return await asyncio.to_thread(self._count, batch)

    def _count(self, batch: str) -> Look:
        requests, answers = requests_of(self._folder, batch), answers_of(self._folder, batch)
        done = total = 0
        with suppress(FileNotFoundError):
            done = sum(glance(line) is not None for _, line in result_lines(answers))
        try:
            total = sum(1 for _ in result_lines(requests))
            status = "completed" if done >= total else "in_progress"
        except FileNotFoundError:
            status = "cancelled"
        files = (str(answers),) if answers.exists() else ()
        return Look(batch, status, done, total, status != "in_progress", files)

    async def find(self, batch: Batch, others: Collection[str]) -> Look | bool:
        """Look for the file of requests."""
        intent = batch.intent.intent
        return await self.look(intent) if requests_of(self._folder, intent).exists() else False

    async def cancel(self, batch: str) -> None:
        """Remove the requests."""
        requests_of(self._folder, batch).unlink(missing_ok=True)

    async def download(self, look: Look, path: Path) -> None:
        """Copy the answers, which somebody may still change, to where results are kept."""
        await asyncio.to_thread(self._copy, look, path)

    def _copy(self, look: Look, path: Path) -> None:
        with replacing(path) as target:
            if look.files:
                with answers_of(self._folder, look.id).open("rb") as source:
                    shutil.copyfileobj(source, target, 1 << 20)


def requests_of(folder: Path, intent: str) -> Path:
    """Return the file of a batch's requests."""
    return folder / f"{intent}.requests.jsonl"


def answers_of(folder: Path, intent: str) -> Path:
    """Return the file in which a batch's answers are expected."""
    return folder / f"{intent}.answers.jsonl"


def answer_command(folder: Path, intent: str) -> str:
    """Return the command that answers a batch."""
    requests, answers = requests_of(folder, intent), answers_of(folder, intent)
    with requests.open("rb") as file:
        model = msgspec.json.decode(file.readline())["body"]["model"]
    return shlex.join(["vllm", "run-batch", "-i", str(requests), "-o", str(answers), "--model", model])


_APIS: Final[dict[Api, type[BatchApi]]] = {
    "chat": OpenAIBatches,
    "completions": OpenAIBatches,
    "responses": OpenAIBatches,
    "messages": AnthropicBatches,
}


def batch_api_of(endpoint: ModelEndpoint) -> type[BatchApi] | None:
    """Return the API of batches at a model's server; None if it has no batches."""
    host = urlsplit(endpoint.urls[0]).hostname or ""
    if endpoint.provider == "together" or host.endswith(("together.xyz", "together.ai")):
        return TogetherBatches if endpoint.api in ("chat", "completions") else None
    return None if endpoint.access in ("aws", "gcp") else _APIS.get(endpoint.api)


def batch_problem(block: BatchBlock, model: str, endpoint: ModelEndpoint) -> str | None:
    """Return why a model cannot be asked in batches; None if it can."""
    if is_embedded(model):
        return "the embedded model has no batches"
    if block.via == "files":
        return None if endpoint.api == "chat" else f"files of batches are for the chat API, not {endpoint.api!r}"
    if batch_api_of(endpoint) is None:
        return f"batches of {model} are not supported (API {endpoint.api!r})"
    return "batches are submitted to one server: give a single base_url" if len(endpoint.urls) > 1 else None


def most_requests(endpoint: ModelEndpoint) -> int:
    """Return how many requests one batch may have."""
    return (batch_api_of(endpoint) or BatchApi).most_requests
