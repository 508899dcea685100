"""Changing one thing and running again, with everything counted that was asked and graded."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.spec.schema import SCHEMA_VERSION
from tests.support.running import Server, holdfast, lines, spawn

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Did:
    """Result of one command."""

    run: Path
    asked: int
    """requests at the model's server, or calls of the Python target"""
    judged: int
    """requests at the judge's server"""
    graded: dict[str, int]
    """gradings by grader: lines of grades.jsonl that this command added and that no other run gave it"""
    out: str
    err: str

    @property
    def work(self) -> tuple[int, dict[str, int]]:
        """Requests and gradings."""
        return self.asked, self.graded


@dataclass
class Lab:
    """A folder with an eval, its data and its runs."""

    folder: Path
    provider: Server
    judge: Server | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    spec: dict[str, Any] = field(default_factory=dict)
    run: Path = field(init=False)  # set by tests that share one run

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows = self.rows or rows(6)
        self.spec = {
            "schemaVersion": SCHEMA_VERSION,
            "name": "e",
            "dataset": {"path": "data.jsonl"},
            "target": {"model": "test-model", "base_url": self.provider.base_url},
            "prompt": "{{ question }}",
            "graders": [{"type": "exact", "name": "correct"}],
            **self.spec,
        }

    @property
    def runs(self) -> Path:
        """The runs directory."""
        return self.folder / "runs"

    @property
    def eval_file(self) -> Path:
        """The eval file."""
        return self.folder / "e.yaml"

    def write(self) -> None:
        """Eval and data as they are now."""
        (self.folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self.eval_file.write_text(json.dumps(self.spec))  # JSON is YAML

    def use_agent(self, source: str = "def answer(prompt):\n    return prompt\n") -> None:
        """A Python target that notes each call; what it says comes from `tools/answers.py`."""
        (self.folder / "tools").mkdir(exist_ok=True)
        (self.folder / "tools" / "answers.py").write_text(source)
        (self.folder / "agent.py").write_text(
            "from pathlib import Path\n"
            "from tools.answers import answer\n"
            "def reply(prompt):\n"
            "    with Path(__file__).with_name('calls.txt').open('a') as calls:\n"
            "        calls.write('call\\n')\n"
            "    return answer(prompt)\n"
        )
        self.spec["target"] = {"python": "agent.py:reply"}

    def do(self, *arguments: Any, cwd: Path | None = None, env: dict[str, str] | None = None, check: int = 0) -> Did:
        """Run a command, and count."""
        asked, judged = self._asked(), 0 if self.judge is None else self.judge.requests
        before = {path.stat().st_ino: len(lines(path)) for path in self._journals()}
        done = holdfast(*arguments, cwd=cwd or self.folder, env=env, check=check)
        graded: Counter[str] = Counter()
        for path in self._journals():
            new = lines(path)[before.get(path.stat().st_ino, 0) :]
            graded.update(grade["grader"] for grade in new if "source" not in grade)
        place = re.search(r"^run: (.+)$", done.stdout, re.MULTILINE)
        return Did(
            run=(cwd or self.folder) / place[1] if place else self.runs,
            asked=self._asked() - asked,
            judged=0 if self.judge is None else self.judge.requests - judged,
            graded=dict(graded),
            out=done.stdout,
            err=done.stderr,
        )

    def eval(self, *arguments: Any, **keys: Any) -> Did:
        """Write the files and run the eval."""
        self.write()
        return self.do("eval", self.eval_file.name, *arguments, **keys)

    def many_lives(self) -> int:
        """Run the eval with a kill at every single call that is recorded, to its end; how many kills it were."""
        self.write()
        process = spawn("tests.support.lives", self.eval_file.name, cwd=self.folder)
        out, err = process.communicate(timeout=1800)
        assert process.returncode == 0, out + err
        return int(out)

    def plan(self, *arguments: Any) -> dict[str, Any]:
        """Return the output of `--dry-run --json`."""
        self.write()
        plan: dict[str, Any] = json.loads(
            holdfast("eval", self.eval_file.name, "--dry-run", "--json", *arguments, cwd=self.folder).stdout
        )
        return plan

    def edit(self, name: str, old: str, new: str) -> None:
        """Change a file."""
        path = self.folder / name
        text = path.read_text()
        assert old in text, text
        path.write_text(text.replace(old, new))

    def _journals(self) -> list[Path]:
        return [path for path in self.runs.glob("*/*/grades.jsonl") if path.is_file()]

    def _asked(self) -> int:
        calls = self.folder / "calls.txt"
        return self.provider.requests + (len(calls.read_text().splitlines()) if calls.exists() else 0)


def rows(count: int, *, ids: bool = True, start: int = 0) -> list[dict[str, Any]]:
    """Questions; echoed, every second one is answered rightly."""
    created = []
    for number in range(start, start + count):
        question = f"question {number}"
        row = {"question": question, "expected": question if number % 2 == 0 else "something else"}
        created.append({"id": f"s{number}", **row} if ids else row)
    return created


def tree(folder: Path) -> dict[str, Any]:
    """Return names, contents and times of everything below a folder."""
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else None, path.lstat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def remove(run: Path) -> None:
    """Make a run disappear."""
    assert (run / "manifest.json").exists()
    shutil.rmtree(run)
