"""Files of a run with any content: their readers return a record or raise an error of ours, and nothing else."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import HoldfastError, RunFileError
from holdfast.plan.inputs import read_inputs
from holdfast.plugins.batches.ledger import read_batches
from holdfast.store.catalog import list_runs, summarize_run
from holdfast.store.claims import newest_round
from holdfast.store.lines import seal
from holdfast.store.rundir import Manifest, RunDir
from holdfast.store.shared import unwanted_keys
from tests.hostile.inputs import DAMAGED, hostile_eval
from tests.support.running import holdfast, run_dir

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("fuzz")
    holdfast("eval", hostile_eval(folder, "fine"), "--accept-errors", cwd=folder)
    return run_dir(folder)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where the values of a document are."""
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in paths_of(each, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a document with one value replaced."""
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = changed(value[path[0]], path[1:], new)
    return copied


READERS: dict[str, Callable[[RunDir], object]] = {
    "manifest.json": lambda rundir: rundir.read_manifest(),
    "metrics.json": lambda rundir: rundir.read_metrics(),
    "results.json": lambda rundir: rundir.read_results(),
}


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@SETTINGS
def test_a_document_with_a_changed_value_is_read_or_refused(run: Path, name: str, data: st.DataObject) -> None:
    sound = (run / name).read_bytes()
    document = msgspec.json.decode(sound)
    place = data.draw(st.sampled_from(paths_of(document)))
    try:
        (run / name).write_bytes(msgspec.json.encode(changed(document, place, data.draw(JSON))))
        with suppress(HoldfastError):
            READERS[name](RunDir(run))
        summary = summarize_run(RunDir(run))
        assert summary is not None
        str((summary.progress, summary.score_text, summary.age))
        assert list_runs(run.parent.parent)
    finally:
        (run / name).write_bytes(sound)


@pytest.mark.parametrize("name", READERS)
@given(data=st.binary(max_size=200) | JSON.map(msgspec.json.encode))
@SETTINGS
def test_any_bytes_are_read_or_refused(run: Path, name: str, data: bytes) -> None:
    sound = (run / name).read_bytes()
    try:
        (run / name).write_bytes(data)
        with suppress(HoldfastError):
            READERS[name](RunDir(run))
        assert list_runs(run.parent.parent)
    finally:
        (run / name).write_bytes(sound)


@given(lines=st.lists(JSON.map(msgspec.json.encode) | st.binary(max_size=50), max_size=4), cut=st.integers(0, 3))
@SETTINGS
def test_any_ledger_of_batches_is_read(tmp_path: Path, lines: list[bytes], cut: int) -> None:
    intents = [b'{"step":"intent","intent":"i","account":"a","where":"t","digest":"d","requests":["r"],"time":1}']
    text = b"".join(seal(line) for line in (*intents, *lines) if line.endswith(b"}"))
    (tmp_path / "batches.jsonl").write_bytes(text[: len(text) - cut])
    batches = read_batches(RunDir(tmp_path))
    assert set(batches) <= {"i"}
    for batch in batches.values():
        str((batch.name, batch.waiting))


@given(data=st.binary(max_size=100) | JSON.map(msgspec.json.encode))
@SETTINGS
def test_any_list_of_unwanted_keys_plan_and_inputs_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    folder, claims = tmp_path / "shared" / "x", tmp_path / "claims" / "0001"
    for place in (folder, claims):
        place.mkdir(parents=True, exist_ok=True)
    (folder / "unwanted.json").write_bytes(data)
    (claims / "plan.json").write_bytes(data)
    (tmp_path / "inputs.jsonl").write_bytes(seal(data) if data.endswith(b"}") else data)
    with suppress(HoldfastError):
        unwanted_keys(folder / "outputs.0.10.jsonl")
    with suppress(HoldfastError):
        newest_round(RunDir(tmp_path))
    read_inputs(RunDir(tmp_path))


def test_a_document_that_nests_too_deeply_is_not_a_manifest(tmp_path: Path) -> None:
    DAMAGED["nested"](tmp_path / "manifest.json")
    with pytest.raises(HoldfastError, match=r"manifest\.json: not a manifest"):
        RunDir(tmp_path).read_manifest()
    with pytest.raises(RecursionError):  # which is what has to be caught
        msgspec.json.decode((tmp_path / "manifest.json").read_bytes(), type=Manifest)


def test_a_path_that_is_not_a_file_is_also_an_error_of_the_system() -> None:
    assert issubclass(RunFileError, OSError), "readers that can do without a file need not know the difference"
    error = RunFileError("what", remedy="do")
    assert (str(error), error.exit_code) == ("what\nhint: do", 3)
