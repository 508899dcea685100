"""Bytes that are set aside: they come back, and a full disk is named."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.plugins.exporters.junit import write_junit
from holdfast.plugins.lm_eval import write_lm_eval
from holdfast.plugins.nat.export import write_nat
from holdfast.report.run_view import RunView
from holdfast.store.files import Spool
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE = b"x" * (2 << 20)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put temporary files on a disk that is full."""

    def open_full(*_: object, **__: object) -> IO[Any]:
        return Path("/dev/full").open("w+b")

    monkeypatch.setattr(tempfile, "TemporaryFile", open_full)


def test_bytes_are_read_back_from_memory_and_from_a_file() -> None:
    for data in (b"few", LARGE):
        with Spool() as spool:
            spool.write(data)
            spool.write(b"more")
            assert spool.tell() == len(data) + 4
            spool.seek(len(data))
            assert spool.read(2) == b"mo" and spool.read() == b"re"


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_names_the_folder() -> None:
    with Spool() as spool, pytest.raises(OSError) as raised:
        spool.write(LARGE)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, tempfile.gettempdir())


@pytest.mark.usefixtures("full_disk")
def test_buffered_bytes_that_no_longer_fit_name_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.store.files._IN_MEMORY", 1)
    with Spool() as spool, pytest.raises(OSError) as raised:
        spool.write(b"few")
        spool.seek(0)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, tempfile.gettempdir())


def _answer(prompt: str) -> str:
    return prompt * 2_000_000


def _explain(output: str) -> dict[str, Any]:
    return {"score": 0.0, "feedback": output}


@pytest.mark.parametrize("write", [write_nat, write_junit, write_lm_eval])
def test_an_export_names_the_folder_that_is_full(
    tmp_path: Path, write: Callable[[RunView, Path], list[Path]], request: pytest.FixtureRequest
) -> None:
    run = holdfast.evaluate(
        name="e",
        samples=[{"id": "a", "letter": "x"}],
        prompt="{{ letter }}",
        target=_answer,
        graders=[_explain],
        runs_dir=tmp_path / "runs",
    )
    (tmp_path / "export").mkdir()
    request.getfixturevalue("full_disk")
    with pytest.raises(OSError) as raised:
        write(RunView(RunDir(run.path)), tmp_path / "export")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, tempfile.gettempdir())
