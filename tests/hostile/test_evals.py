"""A stranger's eval: looking at it starts no program of its folder, and imports nothing from there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.hostile.inputs import hostile_eval
from tests.support.running import environment, holdfast, run_dir
from tests.support.specs import write_spec

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = '#!/bin/sh\necho "$0 $@" >> "{mark}"\necho 1.2.3\n'
MODULE = "import os\nopen({mark!r}, 'a').write(__file__ + chr(10))\n"
COMPUTED = """
import importlib, sys
sys.path.append(os.path.dirname(__file__) + "/more")
importlib.import_module("hidden")


def reply(prompt):
    return prompt


def check(output):
    return True
"""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file in which everything that is run leaves its name."""
    return tmp_path / "it-was-run"


@pytest.fixture
def folder(tmp_path: Path, mark: Path) -> Path:
    """A stranger's folder, in which every program and module leaves a mark."""
    place = tmp_path / "stranger"
    (place / "more").mkdir(parents=True)
    for name in ("evil.sh", "git", "claude", "codex"):
        (place / name).write_text(SCRIPT.format(mark=mark))
        (place / name).chmod(0o755)
    loud = MODULE.format(mark=str(mark))
    (place / "agent.py").write_text(loud + COMPUTED)
    for name in (
        "more/hidden.py",
        "msgspec.py",
        "json.py",
        "lm_eval.py",
        "datasets.py",
        "conftest.py",
        "sitecustomize.py",
    ):
        (place / name).write_text(loud)
    (place / ".env").write_text(f"LD_PRELOAD={place}/evil.so\nPATH={place}\nGIT_SSH_COMMAND={place}/evil.sh\n")
    return place


AGENT: dict[str, Any] = {"agent": "codex", "program": "./evil.sh", "model": "x"}
TARGETS: dict[str, dict[str, Any]] = {
    "agent": {"target": AGENT, "workspace": {}},
    "python": {"target": {"python": "agent.py:reply"}},
    "grader": {"target": {"command": ["./evil.sh"]}, "graders": [{"type": "python", "function": "agent.py:check"}]},
    "program": {"target": {"command": ["./evil.sh"]}, "graders": [{"type": "program", "command": "./evil.sh"}]},
    "tools": {
        "target": {
            "model": "m",
            "base_url": "http://127.0.0.1:1/v1",
            "tools": [{"python": "agent.py:reply"}, {"mcp": {"command": ["./evil.sh"]}}],
        }
    },
    "hooks": {"target": {"command": ["./evil.sh"]}, "hooks": {"before_run": [{"command": "./evil.sh"}]}},
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_dry_run_runs_nothing(folder: Path, mark: Path, name: str) -> None:
    write_spec(folder, **TARGETS[name])
    # As the console script does: `python -m` would put the folder itself on Python's path.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "holdfast", "eval", "eval.yaml", "--dry-run"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not mark.exists(), mark.read_text()
    assert ".env:1: LD_PRELOAD is not taken from this file" in done.stderr


def test_the_plan_names_what_is_unknown_until_the_run(folder: Path, tmp_path: Path) -> None:
    home = {"HOLDFAST_HOME": str(tmp_path / "home")}
    write_spec(folder, target=AGENT, workspace={})
    plan = holdfast("eval", "eval.yaml", "--dry-run", "--no-env-file", cwd=folder, env=home)
    assert "the version of ./evil.sh is unknown until it runs" in plan.stdout
    write_spec(folder, target={"python": "agent.py:reply"}, graders=None)
    plan = holdfast("eval", "eval.yaml", "--dry-run", "--json", "--no-env-file", cwd=folder, env=home)
    (notice,) = json.loads(plan.stdout)["notices"]
    assert "agent.py" in notice and "unknown until it runs" in notice


def test_a_later_plan_knows_what_a_run_has_learned(folder: Path, mark: Path, tmp_path: Path) -> None:
    home = {"HOLDFAST_HOME": str(tmp_path / "home")}
    write_spec(folder, target={"python": "agent.py:reply"}, graders=None)
    holdfast("eval", "eval.yaml", "--no-env-file", cwd=folder, env=home)
    assert "hidden.py" in mark.read_text(), "it is imported when it runs"
    mark.unlink()

    def plan() -> dict[str, Any]:
        done = holdfast("eval", "eval.yaml", "--dry-run", "--json", "--no-env-file", cwd=folder, env=home)
        assert not mark.exists()
        return dict(json.loads(done.stdout))

    first = plan()
    assert (first["notices"], first["finished"], first["to_run"]) == ([], 2, 0)
    (folder / "more" / "hidden.py").write_text((folder / "more" / "hidden.py").read_text() + "x = 1\n")
    assert plan()["to_run"] == 2, "a module that only running shows has changed"


LOOKS: dict[str, tuple[str, ...]] = {
    "ls": ("ls",),
    "show": ("show", "RUN"),
    "show a sample": ("show", "RUN", "0"),
    "compare": ("compare", "RUN", "RUN"),
    "gate": ("gate", "RUN", "--min", "score=0"),
    "export": ("export", "RUN", "--to", "csv"),
    "html": ("export", "RUN", "--to", "html"),
    "repair": ("repair", "RUN"),
    "status": ("status", "RUN"),
    "logs": ("logs", "RUN"),
    "cache": ("cache", "ls"),
    "tasks": ("tasks", "ls"),
    "tasks show": ("tasks", "show", "gsm8k"),
}


def test_looking_at_a_run_runs_nothing_of_its_eval(folder: Path, mark: Path) -> None:
    hostile_eval(folder, "fine")
    holdfast("eval", "eval.yaml", "--accept-errors", "--no-env-file", cwd=folder)
    (folder / "agent.py").write_text(MODULE.format(mark=str(mark)) + COMPUTED)
    mark.unlink(missing_ok=True)
    run = str(run_dir(folder))
    for arguments in LOOKS.values():
        words = [run if word == "RUN" else word for word in arguments]
        subprocess.run(
            [sys.executable, "-P", "-m", "holdfast", *words],
            cwd=folder,
            env=environment(),
            capture_output=True,
            check=False,
        )
        assert not mark.exists(), f"{words}: {mark.read_text()}"


def test_helper_processes_import_nothing_from_the_current_folder() -> None:
    """`python -m` has the current folder on Python's path, unless it is told otherwise."""
    source = Path(__file__).parents[2] / "src" / "holdfast"
    for path in (*(source / "apps" / "view").glob("*.py"), source / "plugins" / "benchmarks" / "compile.py"):
        text = path.read_text()
        assert text.count('sys.executable, "-P", "-m"') == text.count("sys.executable"), path
    assert "sys.executable" in text


# git


def git(*arguments: str | Path, cwd: Path) -> str:
    options = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", *options, *map(str, arguments)], cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A bare repository with two files."""
    work = tmp_path / "work"
    work.mkdir()
    git("init", "-q", cwd=work)
    (work / "a.txt").write_text("hello\n")
    (work / "b.txt").write_text("there\n")
    git("add", ".", cwd=work)
    git("commit", "-qm", "x", cwd=work)
    git("clone", "-q", "--bare", work, tmp_path / "stranger" / "r.git", cwd=tmp_path)
    return tmp_path / "stranger" / "r.git"


TASK = "id: one\ninputs:\n  prompt: Look.\n  repos: [{type: worktree, source: r.git, dest: code}]\n"
WAZA = (
    "name: e\nskill: s\nversion: '1.0'\nconfig: {trials_per_task: 1, executor: mock, model: m}\ntasks: [tasks/*.yaml]\n"
)


def with_waza(folder: Path) -> None:
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "tasks" / "one.yaml").write_text(TASK)
    (folder / "eval.yaml").write_text(WAZA)


def missing_blob(repository: Path, evil: Path) -> None:
    """Remove a blob, and name a program that would fetch it."""
    blob = git("rev-parse", "HEAD:a.txt", cwd=repository)
    for pack in (repository / "objects" / "pack").glob("*"):
        pack.unlink()
    (repository / "objects" / blob[:2] / blob[2:]).unlink(missing_ok=True)
    settings = {
        "core.repositoryformatversion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.url": str(repository),
        "remote.origin.promisor": "true",
        "remote.origin.uploadpack": str(evil),
        "protocol.file.allow": "always",
    }
    for name, value in settings.items():
        git("config", name, value, cwd=repository)


def programs_everywhere(repository: Path, evil: Path) -> None:
    """Name a program wherever the configuration of a repository can."""
    for name in (
        *(
            "core.fsmonitor",
            "core.sshCommand",
            "core.editor",
            "core.pager",
            "core.askPass",
            "core.alternateRefsCommand",
        ),
        *(
            "diff.external",
            "filter.lfs.smudge",
            "filter.lfs.process",
            "credential.helper",
            "uploadpack.packObjectsHook",
        ),
        *("alias.rev-parse", "alias.ls-tree", "alias.cat-file", "gpg.program", "sequence.editor", "pager.ls-tree"),
    ):
        git("config", name, f"!{evil}" if name.startswith("alias") else str(evil), cwd=repository)
    git("config", "core.hooksPath", str(evil.parent), cwd=repository)


@pytest.mark.parametrize("prepare", [missing_blob, programs_everywhere])
def test_the_configuration_of_a_repository_runs_nothing(
    folder: Path, repository: Path, mark: Path, prepare: Callable[[Path, Path], None]
) -> None:
    # Objects that are not packed, so that one can be missing.
    packs = list((repository / "objects" / "pack").glob("*.pack"))
    for pack in packs:
        moved = pack.rename(folder / pack.name)
        subprocess.run(["git", "unpack-objects", "-q"], stdin=moved.open("rb"), cwd=repository, check=True)
    prepare(repository, folder / "evil.sh")
    with_waza(folder)
    done = holdfast("eval", "eval.yaml", "--dry-run", "--no-env-file", cwd=folder, check=None)
    assert not mark.exists(), mark.read_text()
    if prepare is missing_blob:
        assert done.returncode == 2 and "a.txt is not in the repository, which may be a partial clone" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "the 2 files of" in done.stdout + done.stderr


@pytest.mark.parametrize("form", ["sha1", "sha256"])
def test_repositories_of_every_form_are_still_read(folder: Path, tmp_path: Path, form: str) -> None:
    work = folder / "r.git"  # with a working tree, and read through a linked one
    work.mkdir()
    git("init", "-q", f"--object-format={form}", cwd=work)
    (work / "a.txt").write_text("hello\n")
    git("add", ".", cwd=work)
    git("commit", "-qm", "x", cwd=work)
    with_waza(folder)
    done = holdfast("eval", "eval.yaml", "--dry-run", "--no-env-file", cwd=folder)
    assert "the 1 files of" in done.stdout + done.stderr
    git("worktree", "add", "-q", tmp_path / "linked", cwd=work)
    (folder / "tasks" / "one.yaml").write_text(TASK.replace("r.git", str(tmp_path / "linked")))
    done = holdfast("eval", "eval.yaml", "--dry-run", "--no-env-file", cwd=folder)
    assert "the 1 files of" in done.stdout + done.stderr
