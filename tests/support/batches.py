"""Scripted providers of batches on loopback that count what they would bill, and a stand-in for `vllm run-batch`.

The forms of other providers follow their documentation: https://learn.microsoft.com/azure/foundry/openai/how-to/batch,
https://console.groq.com/docs/batch, https://docs.together.ai/docs/inference/batch/manage, and vLLM's
`entrypoints/openai/run_batch.py`.

A provider runs the requests of a batch when the batch is submitted, and shows the results once `release` was called or
`holds` is false. It refuses what the real ones refuse, and shows each account only its own batches. A test may be
called at any step, to kill the process, say: instead of the step (`before`), or after it and instead of its answer
(`after`).
"""

from __future__ import annotations

import json
import re
import shlex
import threading
import time
from collections import Counter
from contextlib import contextmanager
from datetime import UTC, datetime
from email.parser import BytesParser
from email.policy import HTTP
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from tests.support.providers import Asked, Refused, Say
from tests.support.providers.chat import WIRE
from tests.support.serving import read_body, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from http.server import BaseHTTPRequestHandler
    from pathlib import Path

Step = str
"""`upload`, `submit`, `look`, `list`, `results` or `cancel`"""


def echo(body: dict[str, Any]) -> Say:
    """Answer with the last user message."""
    return Say(prompt_of(body))


def prompt_of(body: dict[str, Any]) -> str:
    """Return the last message of a request, as text."""
    content = body["messages"][-1].get("content")
    return content if isinstance(content, str) else json.dumps(content)


class Batch:
    """A batch at the provider."""

    def __init__(self, number: int, account: str, lines: list[dict[str, Any]], about: dict[str, Any]) -> None:
        self.id = f"batch_{number}"
        self.account = account
        self.lines = lines
        self.about = about
        self.created = time.time()
        self.results: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []
        self.status = "in_progress"
        self.problem: dict[str, Any] | None = None


class BatchServer:
    """The provider."""

    root = "/v1"
    upload_path = "/files"
    purpose = "batch"
    model = "m"
    variables: ClassVar[dict[str, str]] = {}
    """with which its models are asked; those with its address have the path there"""

    def __init__(self, api: str, answer: Callable[[dict[str, Any]], Say]) -> None:
        self.api = api
        self.wire = import_module(f"tests.support.providers.{api}").WIRE
        self.answer = answer
        self.url = ""
        self.holds = False
        """batches stay in progress"""
        self.refuses: dict[str, int] = {}
        """by prompt: the status with which the request fails inside a batch"""
        self.leaves_out: set[str] = set()
        """prompts that the next batch does not answer before it expires"""
        self.problem: dict[str, Any] | None = None
        """why the next batch fails as a whole"""
        self.status: dict[Step, int] = {}
        """by step: the status with which it is refused, once"""
        self.before: dict[Step, Callable[[], None]] = {}
        self.after: dict[Step, Callable[[], None]] = {}
        """called once at a step"""
        self.during: dict[Step, Callable[[], object]] = {}
        """called once before a step, which is then taken"""
        self.cuts = 0
        """how often results end in the middle of their lines, without a length by which that would show"""
        self.mark = b""
        """what stands before results"""
        self.batches: list[Batch] = []
        self.files: dict[str, tuple[str, bytes]] = {}
        self.billed: Counter[str] = Counter()
        """requests that were run, in batches and one by one, by prompt"""
        self.alone: Counter[str] = Counter()
        """of these, requests outside batches"""
        self.cancelled: list[str] = []
        self.refused: list[str] = []
        self._lock = threading.RLock()

    def release(self) -> None:
        """End all batches."""
        self.holds = False
        with self._lock:
            for batch in self.batches:
                if batch.status == "in_progress":
                    batch.status = "completed"

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a request."""
        data = read_body(handler)
        if handler.headers.get("Transfer-Encoding") == "chunked":
            data = _read_chunks(handler)
        asked = urlsplit(handler.path)
        path = asked.path.removeprefix(self.root)
        step, act = self._route(handler.command, path, parse_qs(asked.query))
        account = self.account_of(handler.headers)
        if (call := self.before.pop(step or "", None)) is not None:
            call()
            handler.close_connection = True
            return
        if (pause := self.during.pop(step or "", None)) is not None:
            pause()
        try:
            _refuse(self.status.pop(step or "", None))
            with self._lock:
                answer = act(account, data, handler.headers.get("Content-Type") or "")
            status = 200
        except Refused as refused:
            if step is None or refused.status not in (404, 429, 500):
                self.refused.append(str(refused))
            answer, status = self.wire.error(refused.status, str(refused)), refused.status
        whole = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        handler.send_response(status)
        if step == "results":
            whole = self.mark + whole
        if step == "results" and self.cuts:
            self.cuts -= 1
            whole, handler.close_connection = whole[: len(whole) // 2], True
            handler.send_header("Connection", "close")
        else:
            handler.send_header("Content-Length", str(len(whole)))
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        if (call := self.after.pop(step or "", None)) is not None:
            if step == "results":
                handler.wfile.write(whole[: len(whole) // 2])
                handler.wfile.flush()
            call()
            handler.close_connection = True
            return
        handler.wfile.write(whole)

    def account_of(self, headers: Any) -> str:
        """Return the key of a request."""
        return headers.get("Authorization") or headers.get("x-api-key") or ""

    def _route(self, method: str, path: str, query: dict[str, list[str]]) -> tuple[Step | None, Callable[..., Any]]:
        root = "/messages/batches" if self.api == "messages" else "/batches"
        after = (query.get("after") or query.get("after_id") or [""])[0]
        if path == self.upload_path and method == "POST":
            return "upload", self._upload
        if (match := re.fullmatch(r"/files/([^/]*)", path)) and method == "GET":
            return "file", lambda account, *_: self._file(account, match[1])
        if match := re.fullmatch(r"/files/(.*)/content", path):
            return "results", lambda account, *_: self._content(account, match[1])
        if path == root and method == "POST":
            return "submit", self._submit
        if path == root:
            return "list", lambda account, *_: self.page(account, after, int(query["limit"][0]))
        if match := re.fullmatch(f"{root}/([^/]*)(/cancel|/results)?", path):
            if match[2] == "/cancel":
                return "cancel", lambda account, *_: self._cancel(account, match[1])
            if match[2] == "/results":
                return "results", lambda account, *_: self._lines(self._find(account, match[1]).results)
            return "look", lambda account, *_: self.describe(self._find(account, match[1]))
        return None, lambda _, data, __: self._alone(path, json.loads(data))

    def _upload(self, account: str, data: bytes, content_type: str) -> Any:
        message = BytesParser(policy=HTTP).parsebytes(f"Content-Type: {content_type}\r\n\r\n".encode() + data)
        parts: dict[Any, Any] = {
            part.get_param("name", header="content-disposition"): part for part in message.iter_parts()
        }
        self.check_upload({name: part.get_payload(decode=True) for name, part in parts.items()})
        number = f"file-{len(self.files) + 1}"
        self.files[number] = account, parts["file"].get_payload(decode=True)
        return self.describe_file(number)

    def check_upload(self, fields: dict[str, bytes]) -> None:
        """Refuse an upload that is not for batches."""
        if fields["purpose"] != self.purpose.encode():
            raise Refused(f"Invalid purpose: {fields['purpose'].decode()}")

    def describe_file(self, number: str) -> dict[str, Any]:
        """Return a file as the provider describes it."""
        return {"id": number, "object": "file", "status": "processed", "purpose": self.purpose}

    def _file(self, account: str, number: str) -> dict[str, Any]:
        if self.files.get(number, ("", b""))[0] != account:
            raise Refused("No such File object", 404)
        return self.describe_file(number)

    def _submit(self, account: str, data: bytes, _: str) -> Any:
        body = json.loads(data)
        if self.api == "messages":
            lines = body["requests"]
            requests = [(line["custom_id"], line["params"]) for line in lines]
            path = "/messages"
        else:
            if self.files.get(body["input_file_id"], ("", b""))[0] != account:
                raise Refused("No such File object", 404)
            lines = [json.loads(line) for line in self.files[body["input_file_id"]][1].splitlines()]
            requests = [(line["custom_id"], line["body"]) for line in lines]
            path = body["endpoint"].removeprefix("/v1")
            self.check_batch(body, lines)
        names = [name for name, _ in requests]
        if len(set(names)) != len(names) or not all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in names):
            raise Refused("custom_id must be unique, and match ^[a-zA-Z0-9_-]{1,64}$")
        batch = Batch(len(self.batches) + 1, account, lines, body)
        self.batches.append(batch)
        if self.problem is not None:
            batch.status, batch.problem, self.problem = "failed", self.problem, None
        else:
            self._run(batch, path, requests)
        return self.describe_new(batch)

    def describe_new(self, batch: Batch) -> dict[str, Any]:
        """Return a batch that was just created, as the provider describes it."""
        return self.describe(batch)

    def check_batch(self, body: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        """Refuse a batch that is not in the provider's form."""
        if body["completion_window"] != "24h" or any(len(value) > 512 for value in body["metadata"].values()):
            raise Refused("Invalid batch")
        if any(line["url"] != body["endpoint"] or line["method"] != "POST" for line in lines):
            raise Refused("The URL of a line is not the batch's")

    def _run(self, batch: Batch, path: str, requests: list[tuple[str, dict[str, Any]]]) -> None:
        left_out, self.leaves_out = self.leaves_out, set()
        expired = False
        for name, body in reversed(requests):  # results come in any order
            prompt = prompt_of(body)
            if prompt in left_out:
                batch.errors.append(self.not_run(name))
                expired = True
                continue
            asked = Asked(
                "/v1" + path, {"authorization": "x", "x-api-key": "x", "anthropic-version": "2023-06-01"}, body
            )
            try:
                _refuse(self.refuses.get(prompt))
                self.wire.check(asked)
            except Refused as refused:
                if prompt not in self.refuses:
                    self.refused.append(str(refused))
                batch.errors.append(self.failed(name, refused))
                continue
            self.billed[prompt] += 1
            batch.results.append(self._answered(name, self.wire.whole(self.answer(body), asked)))
        if self.api == "messages":
            batch.results += batch.errors
        if not self.holds:
            batch.status = "expired" if expired else "completed"

    def _answered(self, name: str, reply: Any) -> dict[str, Any]:
        if self.api == "messages":
            return {"custom_id": name, "result": {"type": "succeeded", "message": reply}}
        return {"id": "r", "custom_id": name, "response": {"status_code": 200, "body": reply}, "error": None}

    def failed(self, name: str, refused: Refused) -> dict[str, Any]:
        error = self.wire.error(refused.status, str(refused))
        if self.api == "messages":
            return {"custom_id": name, "result": {"type": "errored", "error": error}}
        return {"id": "r", "custom_id": name, "response": {"status_code": refused.status, "body": error}, "error": None}

    def not_run(self, name: str) -> dict[str, Any]:
        if self.api == "messages":
            return {"custom_id": name, "result": {"type": "expired"}}
        return {"id": "r", "custom_id": name, "response": None, "error": {"code": "batch_expired", "message": "late"}}

    def _find(self, account: str, number: str) -> Batch:
        for batch in self.batches:
            if batch.id == number and batch.account == account:
                return batch
        raise Refused(f"No batch found with id '{number}'.", 404)

    def describe(self, batch: Batch) -> dict[str, Any]:
        ended = batch.status != "in_progress"
        total = len(batch.lines)
        if self.api == "messages":
            counts = {"processing": total, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
            if ended:
                kinds = Counter(line["result"]["type"] for line in batch.results)
                counts = {name: kinds[name] for name in counts}
            return {
                "id": batch.id,
                "type": "message_batch",
                "processing_status": "ended" if ended else "in_progress",
                "request_counts": counts,
                "created_at": datetime.fromtimestamp(batch.created, UTC).isoformat(),
                "cancel_initiated_at": "2026-01-01T00:00:00Z" if batch.id in self.cancelled else None,
                "results_url": f"{self.url}/messages/batches/{batch.id}/results" if ended else None,
            }
        return {
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.about["endpoint"],
            "input_file_id": batch.about["input_file_id"],
            "status": batch.status,
            "created_at": int(batch.created),
            "metadata": batch.about.get("metadata"),
            "output_file_id": f"{batch.id}-output" if ended and batch.results else None,
            "error_file_id": f"{batch.id}-errors" if ended and batch.errors else None,
            "errors": None if batch.problem is None else {"object": "list", "data": [batch.problem]},
            "request_counts": {
                "total": total,
                "completed": len(batch.results) if ended else 0,
                "failed": len(batch.errors) if ended else 0,
            },
        }

    def _content(self, account: str, file: str) -> bytes:
        number, _, kind = file.rpartition("-")
        batch = self._find(account, number)
        return self._lines(batch.results if kind == "output" else batch.errors)

    def _lines(self, results: list[dict[str, Any]]) -> bytes:
        return b"\n".join(json.dumps(result).encode() for result in results)

    def page(self, account: str, after: str, limit: int) -> Any:
        own = [batch for batch in reversed(self.batches) if batch.account == account]
        if after:
            own = own[[batch.id for batch in own].index(after) + 1 :]
        page = [self.describe(batch) for batch in own[:limit]]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        return {"data": page, "has_more": len(own) > limit, **ends}

    def _cancel(self, account: str, number: str) -> Any:
        batch = self._find(account, number)
        self.cancelled.append(number)
        if batch.status == "in_progress":
            batch.status = "cancelled"
        return self.describe(batch)

    def _alone(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"authorization": "x", "x-api-key": "x", "anthropic-version": "2023-06-01"}
        asked = Asked("/v1" + path, headers, body)
        self.wire.check(asked)
        self.billed[prompt_of(body)] += 1
        self.alone[prompt_of(body)] += 1
        return self.wire.whole(self.answer(body), asked)


def _refuse(status: int | None) -> None:
    if status is not None:
        raise Refused("told to fail", status)


def _read_chunks(handler: BaseHTTPRequestHandler) -> bytes:
    data = b""
    while size := int(handler.rfile.readline(), 16):
        data += handler.rfile.read(size)
        handler.rfile.readline()
    handler.rfile.readline()
    return data


@contextmanager
def batch_server(
    api: str = "chat", answer: Callable[[dict[str, Any]], Say] = echo, kind: type[BatchServer] = BatchServer
) -> Iterator[BatchServer]:
    """Run a provider of batches."""
    running = kind(api, answer)
    with serving(running.take) as address:
        running.url = f"{address}/v1"
        yield running


class AzureServer(BatchServer):
    """Azure's, which reads files for a while, and counts nothing before a batch has begun."""

    root = "/openai/v1"
    variables: ClassVar = {"AZURE_OPENAI_ENDPOINT": "", "AZURE_OPENAI_API_KEY": "k"}
    model = "azure/my-deployment"

    def __init__(self, api: str, answer: Callable[[dict[str, Any]], Say]) -> None:
        super().__init__(api, answer)
        self._read: set[str] = set()

    def account_of(self, headers: Any) -> str:
        if headers.get("Authorization") or headers.get("api-key") != "k":
            raise AssertionError("Access denied: the key belongs into the header api-key")
        return "k"

    def describe_file(self, number: str) -> dict[str, Any]:
        status = "processed" if number in self._read else "pending"
        self._read.add(number)
        return {**super().describe_file(number), "status": status}

    def check_batch(self, body: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        if body["input_file_id"] not in self._read:
            raise Refused("The file is still being processed")
        if {line["body"]["model"] for line in lines} != {"my-deployment"}:
            raise Refused("model must be the name of one batch deployment, the same in each line")
        super().check_batch(body, lines)

    def describe(self, batch: Batch) -> dict[str, Any]:
        description = super().describe(batch)
        if batch.status == "in_progress":
            description["request_counts"] = {"total": None, "completed": None, "failed": None}
            description["status"] = "Validating"
        description["created_at"] = f"{datetime.fromtimestamp(batch.created, UTC):%Y-%m-%dT%H:%M:%S}.2491382+00:00"
        return {**description, "endpoint": None, "metadata": None}


class GroqServer(BatchServer):
    """Groq's, below another path."""

    root = "/openai/v1"
    variables: ClassVar = {"GROQ_BASE_URL": "", "GROQ_API_KEY": "k"}
    model = "groq/m"

    def check_batch(self, body: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        if body["endpoint"] != "/v1/chat/completions" or body["completion_window"] not in ("24h", "7d"):
            raise Refused("Only /v1/chat/completions is supported, within 24h to 7d")
        super().check_batch(body, lines)


class TogetherServer(BatchServer):
    """Together's: other uploads, no metadata, upper case, and a plain list of all batches, the oldest first."""

    upload_path = "/files/upload"
    purpose = "batch-api"
    variables: ClassVar = {"TOGETHER_BASE_URL": "/v1", "TOGETHER_API_KEY": "k"}
    model = "together/m"

    def check_upload(self, fields: dict[str, bytes]) -> None:
        super().check_upload(fields)
        if not fields["file_name"].endswith(b".jsonl"):
            raise Refused("file_name is required")

    def check_batch(self, body: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        if set(body) != {"input_file_id", "endpoint", "completion_window"}:
            raise Refused(f"unknown fields in {sorted(body)}")
        if any(set(line) != {"custom_id", "body"} for line in lines):
            raise Refused("a line has a custom_id and a body")

    def describe(self, batch: Batch) -> dict[str, Any]:
        description = super().describe(batch)
        for name in ("metadata", "request_counts", "errors", "object"):
            del description[name]
        created = datetime.fromtimestamp(batch.created, UTC).isoformat().replace("+00:00", "Z")
        done = batch.status != "in_progress"
        return {**description, "status": batch.status.upper(), "created_at": created, "progress": 100 if done else 43}

    def describe_new(self, batch: Batch) -> dict[str, Any]:
        return {"job": self.describe(batch), "warning": None}

    def page(self, account: str, after: str, limit: int) -> Any:
        own = [batch for batch in self.batches if batch.account == account]
        return [{**self.describe(batch)} for batch in own]

    def failed(self, name: str, refused: Refused) -> dict[str, Any]:
        return {"custom_id": name, "error": {"message": str(refused), "code": "invalid_request"}}


PROVIDERS: dict[str, type[BatchServer]] = {"azure": AzureServer, "groq": GroqServer, "together": TogetherServer}


def settings(server: BatchServer) -> dict[str, str]:
    """Return the variables with which a provider's models are asked at its stand-in."""
    address = server.url.removesuffix("/v1")
    return {
        name: address + value if name.endswith(("URL", "ENDPOINT")) else value
        for name, value in server.variables.items()
    }


def run_batch(
    command: str,
    folder: Path,
    answer: Callable[[dict[str, Any]], Say] = echo,
    *,
    stop_after: int | None = None,
    refuses: str | None = None,
) -> None:
    """Do what `vllm run-batch` does, which needs a GPU. The request that contains `refuses` has an error."""
    program, verb, *arguments = shlex.split(command)
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert (program, verb) == ("vllm", "run-batch")
    lines = (folder / options["-i"]).read_text().splitlines()
    with (folder / options["-o"]).open("w") as output:
        for number, line in enumerate(lines[:stop_after]):
            request = json.loads(line)
            result = {"id": f"vllm-{number}", "custom_id": request["custom_id"]}
            body: Any = None
            error: Any = None
            status = 200
            asked = Asked(request["url"], {"authorization": "x"}, request["body"])
            if request["method"] != "POST" or request["url"] != "/v1/chat/completions":
                status, error = 400, f"URL {request['url']} was used. Supported endpoints: /v1/chat/completions"
            elif request["body"]["model"] != options["--model"]:
                status = 404
                error = {"error": {"message": "The model does not exist", "type": "NotFoundError", "code": 404}}
            elif refuses is not None and refuses in line:
                status = 400
                error = {"error": {"message": "maximum context length", "type": "BadRequestError", "code": 400}}
            else:
                WIRE.check(asked)
                body = WIRE.whole(answer(request["body"]), asked)
            response = {"status_code": status, "request_id": f"vllm-batch-{number}", "body": body}
            output.write(json.dumps({**result, "response": response, "error": error}) + "\n")
