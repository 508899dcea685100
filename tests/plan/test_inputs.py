"""What code reads while it runs is part of what its results depend on, and so is what the eval file names for it.

Calls of the target and of the graders are counted in files that they append to.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.running import holdfast, lines, metrics, start, wait_for

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 3
AGENT = """from pathlib import Path
{top}
def reply(prompt):
    with Path(__file__).with_name("asked.log").open("a") as log:
        log.write("x\\n")
    return {answer}
"""
GRADER = """import json
from pathlib import Path
{top}
def grade(output):
    with Path(__file__).with_name("graded.log").open("a") as log:
        log.write("x\\n")
    return {score}
"""
REF = 'json.loads(Path(__file__).with_name("ref.json").read_text())'


class Project:
    """A folder with an eval, the code that it runs, and the files that the code reads."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        self.folder, self.keys = folder, keys
        self.agent()
        self.grader()
        for name, text in {"ref.json": "1", "words.txt": "one", "lib.sh": "WORD=one\n", "note.txt": "one"}.items():
            (folder / name).write_text(text)

    def agent(self, answer: str = "prompt", top: str = "") -> None:
        (self.folder / "agent.py").write_text(AGENT.format(answer=answer, top=top))

    def grader(self, score: str = "1", top: str = "") -> None:
        (self.folder / "g.py").write_text(GRADER.format(score=score, top=top))

    def script(self, name: str, text: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.folder / name).chmod(0o755)

    def write(self) -> None:
        spec = {
            "schemaVersion": "1.0",
            "name": "e",
            "samples": [{"id": f"s{number}", "q": f"{number}"} for number in range(ROWS)],
            "prompt": "{{ q }}",
            "target": {"python": "agent.py:reply"},
            "graders": [
                {"type": "python", "name": "mine", "function": "g.py:grade"},
                {"type": "text", "name": "any", "regex_match": "."},
            ],
            **self.keys,
        }
        (self.folder / "e.yaml").write_text(json.dumps(spec))

    def eval(self, *arguments: Any, **keys: Any) -> str:
        self.write()
        done = holdfast("eval", "e.yaml", *arguments, cwd=self.folder, **keys)
        return str(done.stdout + done.stderr)

    def work(self, *arguments: Any, **keys: Any) -> tuple[int, int]:
        """Run the eval; return how often the target and the grader were called."""
        self.calls()
        self.output = self.eval(*arguments, **keys)
        return self.calls()

    def calls(self) -> tuple[int, int]:
        """Return the calls since the last time."""
        counts = []
        for name in ("asked.log", "graded.log"):
            log = self.folder / name
            counts.append(len(log.read_text().splitlines()) if log.exists() else 0)
            log.unlink(missing_ok=True)
        return counts[0], counts[1]

    @property
    def runs(self) -> list[Path]:
        return sorted(self.folder.glob("runs/e/*-*/"), key=lambda run: (run / "manifest.json").stat().st_mtime)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


ALL, GRADES, NONE = (ROWS, ROWS), (0, ROWS), (0, 0)
WAYS_TO_READ = {
    "a file of the grader": (lambda p: p.grader(REF), "ref.json", GRADES),
    "a file of the target": (lambda p: p.agent("Path('words.txt').read_text()"), "words.txt", ALL),
    "at import": (lambda p: p.grader("REF", f"REF = {REF}"), "ref.json", GRADES),
    "with os.open": (
        lambda p: p.grader("ref()", "import os\ndef ref(): return int(os.read(os.open('ref.json', os.O_RDONLY), 9))"),
        "ref.json",
        GRADES,
    ),
    "in a thread of its own": (
        lambda p: p.grader(
            "ref()",
            "from concurrent.futures import ThreadPoolExecutor\ndef read(): return json.load(open('ref.json'))\n"
            "def ref():\n    with ThreadPoolExecutor(1) as pool: return pool.submit(read).result()",
        ),
        "ref.json",
        GRADES,
    ),
    "a module by a computed name": (
        lambda p: (
            (p.folder / "helper.py").write_text("def score(): return 1\n"),
            p.grader("importlib.import_module('hel' + 'per').score()", "import importlib"),
        ),
        "helper.py",
        GRADES,
    ),
    "a file that is executed": (
        lambda p: (
            (p.folder / "part.txt").write_text("score = 1"),
            p.grader(
                "run()", "def run():\n    names = {}; exec(open('part.txt').read(), names); return names['score']"
            ),
        ),
        "part.txt",
        GRADES,
    ),
    "a file that was not there": (
        lambda p: (
            (p.folder / "extra.txt").unlink(missing_ok=True),
            p.grader(
                "0 if extra() else 1",
                "def extra():\n    try: return open('extra.txt').read()\n    except OSError: return ''",
            ),
        ),
        "extra.txt",
        GRADES,
    ),
    "a file that only a module of both reads": (
        lambda p: (
            (p.folder / "kit.py").write_text("def word(): return open('words.txt').read()\n"),
            p.agent("kit.word()", "import kit"),
            p.grader("1", "import kit"),
        ),
        "words.txt",
        ALL,
    ),
    "the name under files": (
        lambda p: (p.keys.update(files={"mine": ["ref.json"]}), p.grader(REF)),
        "ref.json",
        GRADES,
    ),
    "a hidden file": (lambda p: p.grader("len(open('.env').read()) and 1"), ".env", NONE),
    "a file that is no input": (
        lambda p: (p.keys.update(files=["!words.txt"]), p.agent("Path('words.txt').read_text()")),
        "words.txt",
        NONE,
    ),
    "a file that the code writes": (
        lambda p: p.agent(
            "save()",
            "def save():\n    old = Path('words.txt').read_text(); Path('words.txt').write_text(old + '.'); return old",
        ),
        "words.txt",
        NONE,
    ),
}


@pytest.mark.parametrize(("code", "file", "again"), WAYS_TO_READ.values(), ids=WAYS_TO_READ)
def test_what_depends_on_a_file_that_code_reads_is_done_again_when_it_changes(
    project: Project, code: Any, file: str, again: tuple[int, int]
) -> None:
    (project.folder / ".env").write_text("A=1\n")
    code(project)
    assert project.work() == ALL
    first = project.runs[0]
    assert project.work() == NONE, "unchanged"
    path = project.folder / file
    before = path.read_text() if path.exists() else None
    changed = {"helper.py": "def score(): return 0\n", "part.txt": "score = 0", ".env": "A=2\n"}
    path.write_text(changed.get(file, "0"))
    planned = project.eval("--dry-run")
    named = "mine` changed" if project.keys.get("files") == {"mine": ["ref.json"]} else f"{file} changed, which "
    assert (named in planned) == (again != NONE)
    assert project.work() == again
    assert project.work() == NONE, "once is enough"
    if again == GRADES:
        assert metrics(project.runs[-1])["metrics"]["mine"]["score"] == 0
        assert metrics(first)["metrics"]["mine"]["score"] == 1, "the earlier run keeps its verdicts"
    if before is not None and again != NONE:
        path.write_text(before)
        assert project.work() == NONE and str(first.name) in project.output, "as it was in the first run"


def test_a_run_that_reuses_another_inherits_what_its_records_depend_on(project: Project) -> None:
    project.agent("Path('words.txt').read_text()")
    project.grader(REF)
    project.work()
    project.keys["trials"] = 2
    assert project.work() == ALL, "the second trials"
    shutil.rmtree(project.runs[0])
    assert project.work() == NONE
    (project.folder / "ref.json").write_text("0")
    assert project.work() == (0, 2 * ROWS)
    shutil.rmtree(project.runs[0])
    assert project.work() == NONE, "the others can be removed"
    (project.folder / "words.txt").write_text("two")
    assert project.work() == (2 * ROWS, 2 * ROWS)


def test_a_moved_project_keeps_its_results_and_notices_changes(project: Project, tmp_path_factory: Any) -> None:
    project.grader(REF)
    project.work()
    moved = tmp_path_factory.mktemp("moved") / "project"
    shutil.move(project.folder, moved)
    project.folder = moved
    assert project.work() == NONE
    (moved / "ref.json").write_text("0")
    assert project.work() == GRADES


def test_a_file_that_changes_between_two_lives_of_a_run_begins_another_one(project: Project) -> None:
    project.agent(
        "wait() + Path('words.txt').read_text()",
        "import os, time\ndef wait():\n"
        "    while os.path.exists('hold') and len(open('asked.log').readlines()) > 1: time.sleep(0.01)\n    return ''",
    )
    (project.folder / "hold").write_text("")
    project.keys["limits"] = {"concurrency": 1}
    project.write()
    with start("eval", "e.yaml", cwd=project.folder) as running:
        wait_for(lambda: [*project.folder.glob("runs/*/*/outputs.jsonl")], "the first output's file")
        wait_for(lambda: lines(project.runs[0] / "outputs.jsonl"), "the first output")
        running.kill()
        running.communicate()
    (project.folder / "hold").unlink()
    assert project.work()[0] == ROWS - 1, "unchanged, it is resumed"
    (project.folder / "words.txt").write_text("two")
    assert project.work()[0] == ROWS
    assert {line["output"] for line in lines(project.runs[-1] / "outputs.jsonl")} == {"two"}


def test_several_workers_note_what_they_read(project: Project) -> None:
    project.agent("Path('words.txt').read_text()")
    project.grader(REF)
    assert project.work("--workers", "2") == ALL
    assert project.work() == NONE
    (project.folder / "ref.json").write_text("0")
    assert project.work("--workers", "2") == GRADES
    assert project.work() == NONE


def test_a_stale_run_is_not_resumed_and_its_outputs_are_graded_only_while_they_hold(project: Project) -> None:
    project.agent("Path('words.txt').read_text()")
    project.grader(REF)
    project.work()
    (run,) = project.runs
    (project.folder / "ref.json").write_text("0")
    refused = holdfast("resume", run, cwd=project.folder, check=2)
    assert "ref.json changed, which g.py read" in refused.stderr
    project.calls()
    holdfast("grade", run, cwd=project.folder)
    assert project.calls() == GRADES
    (project.folder / "words.txt").write_text("two")
    refused = holdfast("grade", run, cwd=project.folder, check=2)
    assert "words.txt changed, which agent.py read" in refused.stderr and project.calls() == NONE
    assert project.work("--accept-drift") == NONE


def test_what_a_program_of_the_code_writes_is_named_and_is_no_input(project: Project) -> None:
    project.agent(
        "run()",
        "import subprocess\ndef run():\n"
        "    subprocess.run('date +%N > made.txt', shell=True); return Path('made.txt').read_text()",
    )
    project.keys["limits"] = {"concurrency": 1}
    assert project.work() == ALL
    assert "agent.py reads made.txt, which is written while the eval runs: it is part of no key" in project.output
    (project.folder / "made.txt").write_text("other")
    assert project.work() == NONE


def test_a_file_that_is_edited_during_a_run_is_named_and_done_again(project: Project) -> None:
    project.agent(
        "edit()",
        "def edit():\n    import subprocess; word = Path('words.txt').read_text()\n"
        "    if word == 'one': subprocess.run('echo two > words.txt', shell=True)\n    return word",
    )
    project.keys["limits"] = {"concurrency": 1}
    assert project.work() == ALL
    assert "words.txt changed while the eval was running, and agent.py read it" in project.output
    assert project.work() == ALL
    assert {line["output"] for line in lines(project.runs[-1] / "outputs.jsonl")} == {"two\n"}
    assert project.work() == NONE


SCRIPTS = {
    "a script that includes another": (
        lambda p: p.script("answer.sh", 'echo x >> asked.log; . ./lib.sh; echo "$WORD"'),
        {"target": {"command": ["./answer.sh"], "proxy": False}, "files": {"target": "lib.sh"}},
        "lib.sh",
        (ALL, ALL),
    ),
    "a grader's program": (
        lambda p: p.script("check.sh", '. "$(dirname "$0")/lib.sh"; [ "$WORD" = one ]'),
        {"graders": [{"type": "program", "name": "mine", "command": "./check.sh"}], "files": {"mine": ["*.sh"]}},
        "lib.sh",
        ((ROWS, 0), NONE),
    ),
    "a hook's script": (
        lambda p: (p.script("prepare.sh", "cp note.txt words.txt"), p.agent("Path('words.txt').read_text()")),
        {"hooks": {"before_task": [{"command": "./prepare.sh"}]}, "files": ["prepare.sh", "note.txt", "!words.txt"]},
        "note.txt",
        (ALL, ALL),
    ),
}


@pytest.mark.parametrize(("code", "keys", "file", "calls"), SCRIPTS.values(), ids=SCRIPTS)
def test_files_that_scripts_use_count_where_they_are_named(
    project: Project, code: Any, keys: Any, file: str, calls: Any
) -> None:
    code(project)
    project.keys.update(keys)
    assert project.work() == calls[0]
    assert project.work() == NONE
    path = project.folder / file
    path.write_text(path.read_text().replace("one", "two"))
    assert project.work() == calls[1]
    if calls[1] == ALL:
        assert f"{file} changed" in project.output
        assert {line["output"] for line in lines(project.runs[-1] / "outputs.jsonl")} == {"two"}
    else:
        assert "grader `mine` changed" in project.output
        assert metrics(project.runs[-1])["metrics"]["mine"]["passed"] == 0


def test_a_hooks_script_that_nobody_names_is_named_in_a_notice(project: Project) -> None:
    project.script("prepare.sh", ":")
    project.keys["hooks"] = {"before_task": [{"command": "./prepare.sh"}]}
    assert "./prepare.sh is part of no key" in project.eval()
    project.keys["files"] = ["!prepare.sh"]
    assert "is part of no key" not in project.eval("--fresh")


def test_variables_that_code_reads_count_where_they_are_named_and_are_stored_nowhere(project: Project) -> None:
    project.agent("os.environ.get('MODE', '')", "import os")
    project.keys["env"] = {"target": ["MODE"]}
    assert project.work(env={"MODE": "secret-1"}) == ALL
    assert project.work(env={"MODE": "secret-1"}) == NONE
    assert "target.environment.MODE changed" in project.eval("--dry-run", env={"MODE": "secret-2"})
    assert project.work(env={"MODE": "secret-2"}) == ALL
    assert project.work() == ALL
    stored = [path for path in project.folder.rglob("*") if path.is_file() and path.name != "outputs.jsonl"]
    kept = [path for path in stored if b"secret-" in path.read_bytes()]
    assert {path.name for path in kept} <= {"results.json"}, "the agent itself has said it"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"files": ["missing.txt"]}, "missing.txt: no such file"),
        ({"files": {"target": ["*.none"]}}, "*.none: no such file"),
        ({"files": ["folder"]}, "folder: is a folder"),
        ({"files": {"mien": ["ref.json"]}}, "did you mean 'mine'"),
        ({"env": {"targets": ["MODE"]}}, "did you mean 'target'"),
        ({"env": ["MODE=1"]}, "'MODE=1' is not the name of an environment variable"),
    ],
)
def test_what_is_named_wrong_is_refused_with_its_line(project: Project, keys: Any, message: str) -> None:
    (project.folder / "folder").mkdir()
    (project.folder / "folder" / "inside").write_text("x")
    project.keys.update(keys)
    refused = project.eval(check=2)
    assert message in refused and "e.yaml:1" in refused
