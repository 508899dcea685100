"""Runs of many long conversations, which are made of the records of a single one that really took place.

Prompts must not depend on the row: then all conversations make the same requests, and the digests in one conversation's
records hold for all.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from holdfast.plan.identity import identify, new_manifest
from holdfast.spec.load import load_eval
from holdfast.store.lines import scan, seal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from holdfast.store.rundir import RunDir

TOOLS = '''
def search(place: str) -> str:
    """Search.

    Args:
        place: what to search for
    """
    return f"{place}: " + "It is said, again and again, that \\"nothing\\" is here. " * (SIZE // 52)
'''


def write_conversations(folder: Path, base_url: str, rows: int, *, turns: int, size: int) -> Path:
    """Write an eval of equal conversations: in each turn the model calls a tool, whose result has `size` bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tools.py").write_text(TOOLS.replace("SIZE", str(size)))
    with (folder / "data.jsonl").open("w") as file:
        file.writelines(json.dumps({"id": f"s{number}"}) + "\n" for number in range(rows))
    spec = {
        "schemaVersion": "1.0",
        "name": "long",
        "dataset": {"path": "data.jsonl"},
        "target": {"model": "m", "base_url": base_url, "tools": [{"python": "tools.py:search"}]},
        "prompt": "Begin.",
        "follow_ups": [f"Continue with part {number}." for number in range(2, turns + 1)],
        "graders": [{"type": "text", "name": "said", "contains": "part"}],
        "limits": {"concurrency": 4, "trial_timeout": 36_000},
    }
    path = folder / "long.yaml"
    path.write_text(json.dumps(spec))
    return path


def copy_conversations(record: RunDir, path: Path, *, unfinished: int = 0) -> RunDir:
    """Write a run of the eval at a path, in which each row has the one conversation of the run `record`.

    Of the last `unfinished` rows only the first half of the calls is there, and no output. Nothing is graded.
    """
    identity = identify(load_eval(path))
    rundir = identity.directory(path.parent / "runs")
    rundir.write_manifest(new_manifest(identity))
    steps, outputs = (list(_heads(record, name)) for name in ("steps", "outputs"))
    count = identity.survey.count
    with (
        (rundir.path / "steps.jsonl").open("wb", buffering=1 << 20) as step_file,
        (rundir.path / "outputs.jsonl").open("wb", buffering=1 << 20) as output_file,
    ):
        for number in range(count):
            rename = _renaming(record, identity.work.key(_digest(identity, number), 1), f"s{number}")
            finished = number < count - unfinished
            step_file.writelines(map(rename, steps if finished else steps[: len(steps) // 2]))
            output_file.writelines(map(rename, outputs if finished else ()))
    return rundir


def _digest(identity: Any, number: int) -> str:
    return "sha256:" + identity.survey.asked_at(number).hex()


def _heads(record: RunDir, name: str) -> Iterator[bytes]:
    for line in scan(record.path / f"{name}.jsonl"):
        assert line.sound
        yield line.data.rpartition(b',"sum":')[0]


def _renaming(record: RunDir, key: str, sample: str) -> Callable[[bytes], bytes]:
    first = next(_heads(record, "outputs"))
    start = first[: first.index(b',"trial":')]
    new = b'{"key":"%b","sample":"%b"' % (key.encode(), sample.encode())
    return lambda head: seal(new + head.removeprefix(start) + b"}")
