"""Scripted providers whose batches differ from OpenAI's, and a stand-in for `vllm run-batch`.

Each refuses what the real one refuses, by its documentation: https://learn.microsoft.com/azure/foundry/openai/how-to/batch,
https://console.groq.com/docs/batch, https://docs.together.ai/docs/inference/batch/manage, and vLLM's
`entrypoints/openai/run_batch.py`.
"""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

from tests.support.batches import Batch, BatchServer, echo
from tests.support.providers import Asked, Refused
from tests.support.providers.chat import WIRE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.providers import Say


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
