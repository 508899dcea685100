"""NeMo Agent Toolkit for tests: an environment of its own, since it brings eighty packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.running import ROOT, environment
from tests.support.sharing import locked

if TYPE_CHECKING:
    from pathlib import Path

DATA = ROOT / "tests" / "fixtures" / "nat"


class Nat:
    """Runs the command in the environment that has NAT."""

    def __init__(self, python: str) -> None:
        self._python = python

    def start(self, *arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
        """Start the command and return at once."""
        return subprocess.Popen(
            [self._python, "-m", "holdfast", *map(str, arguments)],
            cwd=cwd,
            env=nat_environment(cwd),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def python(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run Python itself in that environment."""
        return subprocess.run(
            [self._python, *arguments], cwd=cwd, env=nat_environment(cwd), capture_output=True, text=True, timeout=300
        )

    def __call__(self, *arguments: str | Path, cwd: Path, check: int = 0) -> Any:
        """Run the command to its end; `check` is the exit code it must have."""
        process = self.start(*arguments, cwd=cwd)
        out, err = process.communicate(timeout=600)
        assert process.returncode == check, f"exit {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in out + err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def nat_environment(folder: Path) -> dict[str, str]:
    """The environment of a process that finds the components installed by `nat_project`."""
    variables = environment(PYTHONPATH=str(folder / "installed"))
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # NAT takes seconds to compile
    return variables


def nat_project(folder: Path) -> Path:
    """A project with components of its own, installed as `pip install -e` does it, and its configuration."""
    for name in ("config.yml", "data.json"):
        shutil.copy(DATA / name, folder / name)
    install_components(folder, "powers")
    return folder / "config.yml"


def install_components(folder: Path, name: str) -> None:
    """Install a module of components for the commands that run in a folder."""
    package = folder / "installed"
    (package / f"{name}-1.0.dist-info").mkdir(parents=True)
    (package / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (package / f"{name}-1.0.dist-info" / "entry_points.txt").write_text(f"[nat.components]\n{name} = {name}\n")
    shutil.copy(DATA / f"{name}.py", package / f"{name}.py")


@pytest.fixture(scope="session")
def nat() -> Nat:
    """The command in an environment with a real NAT."""
    with locked(ROOT / ".venv-nat.lock"):  # test runs in several processes share the environment
        installed = subprocess.run(
            [ROOT / "scripts" / "lab" / "nat-venv"],
            env={**os.environ, "HOLDFAST_VENV": sys.prefix},
            capture_output=True,
            text=True,
        )
    if installed.returncode != 0:
        pytest.skip(f"NAT's packages cannot be installed: {installed.stderr.strip().splitlines()[-1:]}")
    return Nat(installed.stdout.strip())
