"""Batches as files, for models that the user runs without a server: `vllm run-batch -i REQUESTS -o ANSWERS`.

A batch is a file of requests in OpenAI's format. Its answers are expected beside it, in the same format, with a line
for each request. A file of requests that was removed is a batch that was cancelled.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from holdfast.store.batches import result_lines
from holdfast.store.durable import make_directory, replacing, sync_directory
from holdfast.targets.batch_apis import Look, OpenAIBatches, glance

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from holdfast.http.client import Client
    from holdfast.store.batches import Batch

ACCOUNT: Final = "files|"
"""stands for the account in the ledger"""


class FileBatches(OpenAIBatches):
    """Files of requests that somebody answers."""

    verb: ClassVar[str] = "wrote"

    def __init__(self, client: Client, folder: Path, path: str) -> None:
        super().__init__(client, "", path)
        self._folder = folder

    async def upload(self, file: Path, intent: str) -> str:
        """Store the requests where nobody looks for them yet."""
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
