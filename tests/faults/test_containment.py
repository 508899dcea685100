"""Agents leave nothing running: an attempt that was killed, or timed out, has no part in the next one.

The agent of these tests stands in for Claude Code and Codex, which take 800 MB: like them, it runs each command of its
model in a session of its own, and names files in full. `tests/targets/test_agents.py` runs the real ones.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.containment.test_program import BECOME
from tests.support.breaking import assert_same_numbers, kept, leftovers
from tests.support.refusing import UNSHARE
from tests.support.running import ROOT, ask_to_stop, environment, holdfast, run_dir, wait_for
from tests.support.specs import write_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what contains programs is Linux's"),
]

AGENT = """
import os, pathlib, subprocess, sys, time

name, place = os.environ["NAME"], pathlib.Path(os.environ["GATES"])
life = len(list(place.glob("life-*"))) + 1
notes = pathlib.Path(os.environ["HOLDFAST_WORKSPACE"], "notes.txt")
command = f"until [ -e {place}/go-{life} ]; do sleep 0.01; done; echo built >> {notes}; : > {place}/wrote-{life}"
shell = subprocess.Popen(["bash", "-c", f"trap '' TERM HUP; {command}", f"{name}-{life}"], start_new_session=True)
(place / f"life-{life}").touch()
if (place / "hang").exists() and life == 1:
    time.sleep(600)
shell.wait()
print(notes.read_text())
"""

PLACES = ["as I am", "another user", "namespaces refused"]


class Case:
    """An eval with such an agent."""

    def __init__(self, folder: Path, place: str = "as I am") -> None:
        self.folder, self.name = folder, f"tool-{uuid.uuid4()}"
        self.gates = folder / "gates"
        self.gates.mkdir(parents=True)
        self.variables = {"NAME": self.name, "GATES": str(self.gates)}
        (folder / "agent.py").write_text(AGENT)
        self.python = [*(BECOME if place == "another user" else ()), sys.executable]
        self.refused = place == "namespaces refused"

    def write(self, **keys: Any) -> None:
        """Write the eval."""
        target = {"command": [sys.executable, "agent.py"], "proxy": False}
        defaults = {
            "schemaVersion": "1.0",
            "name": "e",
            "samples": [{"id": "a", "expected": "built"}],
            "prompt": "Build it.",
            "workspace": {},
            "target": target,
            "graders": [{"type": "exact"}],
        }
        write_spec(self.folder, **(defaults | keys))

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[str]]:
        """Start Holdfast in this place; it ends with the block at the latest."""
        refusing = ["tests.support.refusing"] if self.refused else []
        argv = [*self.python, "-m", *refusing, "holdfast", "eval", "eval.yaml"]
        env = environment(TMPDIR=str(self.folder), PYTHONPATH=str(ROOT), **self.variables)
        streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(argv, cwd=self.folder, env=env, **streams) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self) -> tuple[Path, str]:
        """Run the eval to its end; return its run, and what it said."""
        with self.started() as process:
            out, err = process.communicate()
        assert process.returncode == 0, err
        return run_dir(self.folder), out + err

    def open_gate(self, life: int) -> None:
        """Let the command of a life write."""
        (self.gates / f"go-{life}").touch()

    def lives(self, count: int) -> None:
        """Wait until the agent has been started so often."""
        wait_for((self.gates / f"life-{count}").exists, f"life {count} of the agent")

    def let_the_dead_write(self) -> None:
        """Open the gate of the first life, and wait until its command has written, if it is still there."""
        self.open_gate(1)
        wrote, first = self.gates / "wrote-1", f"{self.name}-1"
        wait_for(lambda: wrote.exists() or not processes(first), "what the first life does")


def processes(name: str) -> list[psutil.Process]:
    """The processes with a word among their arguments."""
    return [process for process in psutil.process_iter(["cmdline"]) if name in (process.info["cmdline"] or ())]


@pytest.fixture
def case(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Case]:
    place = getattr(request, "param", "as I am")
    if place == "another user":
        nested = [*BECOME, "unshare", "-Ur", "true"]
        if shutil.which("unshare") is None or subprocess.run(nested, check=False).returncode:
            pytest.skip("user namespaces cannot be nested here")
    if place == "namespaces refused" and UNSHARE is None:
        pytest.skip("the number of unshare(2) on this machine is not known to this test")
    case = Case(tmp_path / "case", place)
    yield case
    for life in (1, 2):
        for process in processes(f"{case.name}-{life}"):
            process.kill()


@pytest.mark.parametrize("case", PLACES, indirect=True)
def test_an_agent_killed_during_a_command_in_its_own_session_resumes_as_if_it_never_was(
    case: Case, tmp_path: Path
) -> None:
    calm = Case(tmp_path / "calm")
    calm.write()
    calm.open_gate(1)
    uninterrupted, _ = calm.run()
    case.write()
    with case.started() as process:
        case.lives(1)
        process.kill()
    with case.started() as process:
        case.lives(2)
        case.let_the_dead_write()
        case.open_gate(2)
        _, err = process.communicate()
    assert process.returncode == 0, err
    [output] = kept(run_dir(case.folder))
    assert output["output"] == "built"
    assert_same_numbers(run_dir(case.folder), uninterrupted)
    assert leftovers(case.folder) == []


@pytest.mark.parametrize("case", PLACES, indirect=True)
def test_a_time_out_ends_what_the_attempt_has_detached(case: Case) -> None:
    case.write(limits={"turn_timeout": 2, "retries": 3, "on_limit": "error"})
    (case.gates / "hang").touch()
    for life in (2, 3, 4):
        case.open_gate(life)  # on a slow machine the first of them may run out of time, too
    with case.started() as process:
        case.lives(2)
        case.let_the_dead_write()
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert [output["output"] for output in kept(run_dir(case.folder))] == ["built"]
    assert not (case.gates / "wrote-1").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_a_run_is_interrupted_for_good(case: Case, how: signal.Signals) -> None:
    case.write()
    with case.started() as process:
        case.lives(1)
        if how == signal.SIGINT:
            ask_to_stop(process)
        process.send_signal(how)
        process.communicate()
    assert process.returncode == 128 + how
    assert processes(f"{case.name}-1") == [] == leftovers(case.folder)


DAEMON = "(setsid bash -c 'trap \"\" TERM; sleep 600' > /dev/null 2>&1 &)"


@pytest.mark.parametrize("case", PLACES, indirect=True)
def test_hooks_leave_nothing_behind(case: Case) -> None:
    hook = [{"command": f"bash {case.folder}/hook.sh"}]
    (case.folder / "hook.sh").write_text(f"{DAEMON}\n{DAEMON}\n")
    case.write(
        hooks={"before_run": hook, "before_task": hook, "after_task": hook, "after_run": hook},
        workspace=None,
        target={"command": ["sh", "-c", "pgrep -f 'sleep 600' | wc -l; echo built"], "proxy": False},
        graders=[{"type": "text", "contains": "built"}],
    )
    case.run()
    assert leftovers(case.folder) == []


def test_a_hook_ends_with_holdfast(case: Case) -> None:
    (case.folder / "hook.sh").write_text(f"{DAEMON}\ntouch {case.folder}/up\nsleep 600\n")
    case.write(hooks={"before_run": [{"command": f"bash {case.folder}/hook.sh"}]})
    with case.started() as process:
        wait_for((case.folder / "up").exists, "the hook")
        assert len(leftovers(case.folder)) >= 3
        process.kill()
        wait_for(lambda: not leftovers(case.folder), "the end of all that it started")


@pytest.mark.parametrize("case", ["namespaces refused"], indirect=True)
def test_users_learn_what_contains_programs(case: Case) -> None:
    case.write()
    case.open_gate(1)
    run, said = case.run()
    assert "this system allows no PID namespaces, so the processes of programs are looked for and killed" in said
    assert "programs contained by reaper" in (run / "run.log").read_text()


def test_users_choose_what_contains_programs(case: Case) -> None:
    case.write()
    for life in (1, 2):
        case.open_gate(life)
    env = {**case.variables, "TMPDIR": str(case.folder), "HOLDFAST_PROCESS_ISOLATION": "reaper"}
    done = holdfast("eval", "eval.yaml", cwd=case.folder, env=env)
    assert "PID namespaces" not in done.stderr
    assert "programs contained by reaper" in (run_dir(case.folder) / "run.log").read_text()
    env["HOLDFAST_PROCESS_ISOLATION"] = "none"
    done = holdfast("eval", "eval.yaml", "trials=2", cwd=case.folder, env=env, check=2)
    assert "HOLDFAST_PROCESS_ISOLATION is 'none'" in done.stderr and "auto, pid or reaper" in done.stderr


def test_a_namespace_that_is_asked_for_and_refused_stops_the_run(case: Case) -> None:
    if UNSHARE is None:
        pytest.skip("the number of unshare(2) on this machine is not known to this test")
    case.write()
    argv = [sys.executable, "-m", "tests.support.refusing", "holdfast", "eval", "eval.yaml"]
    env = environment(PYTHONPATH=str(ROOT), HOLDFAST_PROCESS_ISOLATION="pid")
    done = subprocess.run(argv, cwd=case.folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "HOLDFAST_PROCESS_ISOLATION is pid" in done.stderr
    assert not list(case.gates.iterdir()), "no program was started"


PYTHON_AGENT = """
import os, pathlib, subprocess

def reply(context):
    place = pathlib.Path(__file__).parent / "gates"
    life = len(list(place.glob("life-*"))) + 1
    command = f"until [ -e {place}/go-{life} ]; do sleep 0.01; done; echo built >> {context.workspace}/notes.txt"
    shell = subprocess.Popen(["bash", "-c", command, f"NAME-{life}"], cwd=context.workspace, start_new_session=True)
    (place / f"life-{life}").touch()
    shell.wait()
    return (context.workspace / "notes.txt").read_text().strip()
"""


def test_processes_of_python_code_end_before_its_workspace_is_restored(case: Case) -> None:
    """Nothing contains it: it is found by its working directory, and named."""
    (case.folder / "agent.py").write_text(PYTHON_AGENT.replace("NAME", case.name))
    case.write(target={"python": "agent.py:reply"})
    with case.started() as process:
        case.lives(1)
        process.kill()
    assert processes(f"{case.name}-1"), "it survives"
    with case.started() as process:
        case.lives(2)
        assert not processes(f"{case.name}-1")
        case.open_gate(2)
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert "a, trial 1: ended processes that an earlier attempt had left running in its workspace: bash (" in out + err
    assert [output["output"] for output in kept(run_dir(case.folder))] == ["built"]
