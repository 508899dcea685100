"""What an earlier process left in a workspace is found and ended; nobody else's processes are."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING

import psutil
import pytest

from holdfast.containment.survivors import end_survivors
from tests.support.running import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="working directories are Linux's")


END = """
import pathlib, sys
from holdfast.containment.survivors import end_survivors
print(end_survivors(pathlib.Path(sys.argv[1])))
"""


class Processes:
    """Processes that no test waits for: the process that starts them has ended."""

    def __init__(self) -> None:
        self.mark = f"survivor-{uuid.uuid4()}"

    def leave(self, name: str, folder: Path, script: str = "", **variables: str) -> None:
        """Start a process as a daemon; it is called by its name."""
        daemon = f"(exec -a {self.mark}-{name} bash -c '{script or 'while :; do read -t 600 <> <(:); done'}' &)"
        variables = {"PATH": os.environ["PATH"], **variables}
        subprocess.run(["setsid", "bash", "-c", daemon], cwd=folder, env=variables, check=True)
        wait_for(lambda: name in self.alive(), name)

    def alive(self) -> set[str]:
        """The names of those that run."""
        listing = psutil.process_iter(["cmdline"])
        words = [process.info["cmdline"][0] for process in listing if process.info["cmdline"]]
        return {word.removeprefix(f"{self.mark}-") for word in words if word.startswith(self.mark)}

    def end(self) -> None:
        """End all."""
        for process in psutil.process_iter(["cmdline"]):
            if (process.info["cmdline"] or [""])[0].startswith(self.mark):
                process.kill()


@pytest.fixture
def left() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.end()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace" / "src").mkdir(parents=True)
    return tmp_path / "workspace"


def test_processes_of_the_workspace_are_ended_and_named(left: Processes, workspace: Path, tmp_path: Path) -> None:
    left.leave("by-variable", tmp_path, HOLDFAST_WORKSPACE=str(workspace), A="a")
    left.leave("by-folder", workspace)
    left.leave("below", workspace / "src", 'trap "" TERM; while :; do read -t 600 <> <(:); done')
    ended = end_survivors(workspace)
    assert left.alive() == set()
    assert len(ended) >= 3 and all(name.startswith("bash (") for name in ended)
    assert end_survivors(workspace) == []


def test_a_workspace_below_a_link_is_found_by_its_real_folder(left: Processes, workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    named = tmp_path / "link" / "workspace"
    left.leave("by-folder", workspace / "src")
    left.leave("by-variable", tmp_path, HOLDFAST_WORKSPACE=str(named), A="a")
    end_survivors(named)
    assert left.alive() == set()


def test_a_workspace_that_became_a_link_gives_nobody_else_away(
    left: Processes, workspace: Path, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    left.leave("elsewhere", tmp_path / "home")
    (workspace / "src").rmdir()
    workspace.rmdir()
    workspace.symlink_to(tmp_path / "home")
    assert end_survivors(workspace) == []
    assert left.alive() == {"elsewhere"}


def test_a_removed_folder_is_still_the_workspace(left: Processes, workspace: Path) -> None:
    left.leave("inside", workspace / "src")
    (workspace / "src").rmdir()
    end_survivors(workspace)
    assert left.alive() == set()


def test_processes_started_by_survivors_are_ended_too(left: Processes, workspace: Path, tmp_path: Path) -> None:
    """Also if neither its environment nor its working directory tells."""
    child = f'cd {tmp_path}; exec -c -a {left.mark}-child bash -c "read <> <(:)"'
    left.leave("parent", workspace, f"({child}) & wait", HOLDFAST_WORKSPACE=str(workspace))
    wait_for(lambda: "child" in left.alive(), "the child")
    end_survivors(workspace)
    assert left.alive() == set()


def test_other_processes_are_spared(left: Processes, workspace: Path, tmp_path: Path) -> None:
    """Processes of other runs, of the user elsewhere, and of this process."""
    other = tmp_path / "workspace2"
    other.mkdir()
    left.leave("of-another-run", other, HOLDFAST_WORKSPACE=str(other))
    left.leave("with-a-longer-name", tmp_path, HOLDFAST_WORKSPACE=f"{workspace}2", X_HOLDFAST_WORKSPACE=str(workspace))
    left.leave("elsewhere", tmp_path)
    with subprocess.Popen(["sleep", "600"], cwd=workspace, env={"HOLDFAST_WORKSPACE": str(workspace)}) as own:
        assert end_survivors(workspace) == []
        assert own.poll() is None, "such as the MCP server of the trial"
        own.kill()
    assert left.alive() == {"of-another-run", "with-a-longer-name", "elsewhere"}


def test_a_terminal_in_the_workspace_is_spared(workspace: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(workspace)
        os.execvp("bash", ["bash", "--norc", "-i"])
    try:
        os.write(terminal, b"sleep 600\n")
        shell = psutil.Process(pid)
        # A process of its own, which is no ancestor of the terminal's shell, looks for survivors.
        wait_for(lambda: [child.name() for child in shell.children()] == ["sleep"], "the shell and its command")
        done = subprocess.run([sys.executable, "-c", END, str(workspace)], capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n" and shell.is_running()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.close(terminal)
        os.waitpid(pid, 0)


def test_a_process_that_is_started_inside_the_workspace_does_not_end_itself(workspace: Path) -> None:
    shell = f'{sys.executable} -c "$0" "$1"; true'
    argv = ["bash", "-c", shell, END, str(workspace)]
    variables = {**os.environ, "HOLDFAST_WORKSPACE": str(workspace)}
    done = subprocess.run(argv, cwd=workspace, env=variables, capture_output=True, text=True, start_new_session=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
