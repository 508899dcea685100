"""Runs of long conversations: what a command holds in memory does not grow with the number of conversations."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.store.rundir import RunDir
from tests.support.running import environment, holdfast, lines, module_server
from tests.support.transcripts import copy_conversations, write_conversations

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.running import Server

provider = module_server(tool_calls=1)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the most memory that a process held is in /proc")

TURNS = 100
FEW, MANY = 15, 150
UNFINISHED = 1
GROWTH = {
    "resume": 12e6,
    "export to samples": 1.2e6,
    "export to nat": 2e6,
    "export to waza": 4e6,
    "one more grader": 4e6,
}
"""bytes that each command may hold beyond what it holds for few; the journals grow by 50 MB

As objects, turns take 3 MB more and calls 5 MB; so do exports that unpack the references to all outputs at once: 4 MB.
Many conversations have an index that is published, of which up to 16 MB of pages are in memory, however long the run.
"""
_MEASURED = """
import re, sys
from pathlib import Path
from holdfast.apps.cli.main import main
try:
    main()
finally:
    print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1], file=sys.stderr)
"""


def _most_memory(folder: Path, *arguments: str | Path) -> int:
    """Run a command, and return the most bytes that its process held."""
    command = [sys.executable, "-c", _MEASURED, *map(str, arguments)]
    ended = subprocess.run(
        command, cwd=folder, env=environment(HOLDFAST_HOME=str(folder / "home")), capture_output=True, check=False
    )
    assert ended.returncode == 0, ended.stderr.decode()
    return 1024 * int(ended.stderr.split()[-1])


def _commands(folder: Path, record: RunDir, url: str, count: int) -> dict[str, int]:
    path = write_conversations(folder, url, count, turns=TURNS, size=500)
    run = copy_conversations(record, path, unfinished=UNFINISHED).path
    memory = {"resume": _most_memory(folder, "eval", path, "--display", "none")}
    assert len(lines(run / "outputs.jsonl")) == count and json.loads((run / "metrics.json").read_text())["score"] == 1
    for name in ("samples", "nat", "waza"):
        memory[f"export to {name}"] = _most_memory(folder, "export", run, "--to", name)
    spec = json.loads(path.read_text())
    spec["graders"].append({"type": "text", "name": "all", "contains": "nothing", "transcript": "all"})
    path.write_text(json.dumps(spec))
    memory["one more grader"] = _most_memory(folder, "eval", path, "--display", "none")
    return memory


def test_memory_does_not_grow_with_the_number_of_conversations(tmp_path: Path, provider: Server) -> None:
    path = write_conversations(tmp_path / "one", provider.base_url, 1, turns=TURNS, size=500)
    holdfast("eval", path, "--display", "none", cwd=path.parent)
    record = RunDir(next(path.parent.glob("runs/long/*/manifest.json")).parent)
    few, many = (_commands(tmp_path / str(count), record, provider.base_url, count) for count in (FEW, MANY))
    growth = {name: many[name] - few[name] for name in few}
    assert all(growth[name] < allowed for name, allowed in GROWTH.items()), growth
