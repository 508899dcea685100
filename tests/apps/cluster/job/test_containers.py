"""Servers and tasks of local jobs run in their images, with podman or docker, and no container outlives its job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.cluster.config.launch import Server
from holdfast.apps.cluster.job.servers import server_words
from holdfast.apps.cluster.remote.invocation import TaskFolder, read_state
from holdfast.apps.cluster.remote.registry import InvocationRegistry
from holdfast.apps.cluster.remote.transport import Here
from tests.support.launching import deployment
from tests.support.running import holdfast, wait_for, write_eval

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGE = f"localhost/holdfast-test:{os.getpid()}"
"""of this process: others that run tests remove theirs, with its containers"""

SYSTEM = [path for path in ("/usr", "/lib", "/lib64") if Path(path).exists()]
"""the libraries of this machine, which the image lacks"""

RUNTIME = """#!/usr/bin/env python3
# runc without resource limits, which a sandbox may forbid to set.
import json, os, pathlib, sys
if "create" in sys.argv:
    path = pathlib.Path(sys.argv[sys.argv.index("--bundle") + 1], "config.json")
    config = json.loads(path.read_text())
    config["process"].pop("rlimits", None)
    path.write_text(json.dumps(config))
os.execvp("runc", ["runc", *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """A program that starts containers here, with its environment, and an image that holds only busybox."""
    folder = tmp_path_factory.mktemp("engine")
    busybox = Path("/bin/busybox")
    program = next(filter(shutil.which, ("podman", "docker")), None)
    if program is None or not busybox.exists():
        pytest.skip("podman, or docker, and a static busybox are missing; on Debian: podman runc busybox-static")
    with tarfile.open(folder / "image.tar", "w") as tar:
        tar.add(busybox, "bin/busybox")
        for name in ("sh", "true"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        tar.add(busybox, "only-in-the-image")
    runtime = folder / "runc"
    runtime.write_text(RUNTIME)
    runtime.chmod(0o755)
    settings = folder / "containers.conf"
    settings.write_text(f'[engine]\nruntime = "runc"\n[engine.runtimes]\nrunc = ["{runtime}"]\n')
    problem = ""
    for env in ({}, {"CONTAINERS_CONF": str(settings)}):
        variables = {**os.environ, **env}
        make = [program, "import", "--change", "ENV COLOUR=image", str(folder / "image.tar"), IMAGE]
        subprocess.run(make, env=variables, capture_output=True, check=False)
        started = subprocess.run(
            [program, "run", "--rm", "--network=host", IMAGE, "true"], env=variables, capture_output=True, check=False
        )
        problem = started.stderr.decode(errors="replace").strip()
        if started.returncode == 0:
            yield program, env
            subprocess.run([program, "rmi", "--force", IMAGE], env=variables, capture_output=True, check=False)
            return
    pytest.skip(f"{program} cannot start containers here: {problem}")


def site(folder: Path, engine: str, rows: int) -> Path:
    """A folder with a configuration whose server runs in the image, with Python and its files mounted."""
    write_eval(folder, "http://127.0.0.1:1/v1", rows=rows, target={"model": "any"}, limits={"concurrency": 1})
    (folder / "env.toml").write_text('[here]\nexecutor = "local"\n')
    (folder / "model").mkdir()
    (folder / "model" / "name.txt").write_text("the checkpoint\n")
    code = """
seen = [os.environ["SHADE"], os.environ["COLOUR"], open("/checkpoint/name.txt").read()]
counts.write("COLOUR " + " ".join(seen)); counts.flush()
"""
    server = deployment(folder, code=code)
    python = f"{sys.base_prefix}/bin/python3"
    system = [*SYSTEM, sys.base_prefix]
    config: dict[str, Any] = {
        "execution": {
            "type": "local",
            "container_engine": engine,
            "extra_docker_args": "--env=SHADE='rather dark'",
            "mounts": {"deployment": {path: f"{path}:ro" for path in system} | {str(folder): str(folder)}},
        },
        "deployment": server
        | {
            "command": server["command"].replace(sys.executable, python),
            "image": IMAGE,
            "checkpoint_path": str(folder / "model"),
            "env_vars": {"COLOUR": "lit:configuration"},
        },
        "evaluation": {"tasks": ["e.yaml"]},
    }
    (folder / "nano.yaml").write_text(json.dumps(config))
    return folder


def containers(engine: tuple[str, dict[str, str]]) -> list[str]:
    """The containers of the image, also those that have ended."""
    argv = [engine[0], "ps", "--all", f"--filter=ancestor={IMAGE}", "--format={{.Names}}"]
    done = subprocess.run(argv, env={**os.environ, **engine[1]}, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_local_server_runs_in_its_image_with_its_variables_and_mounts(
    engine: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    folder = site(tmp_path, engine[0], rows=4)
    output = holdfast("eval", "-c", "nano", "--run", "here", cwd=folder, env=engine[1]).stdout
    assert "coverage 100.0% of 4 trials" in output
    first, *questions = (folder / "asked.txt").read_text().splitlines()
    assert first == "COLOUR rather dark configuration the checkpoint", "the image says otherwise"
    assert len(questions) == 4
    wait_for(lambda: not containers(engine), "the end of the container")


@pytest.mark.faults
@pytest.mark.parametrize("how", ["kill -9 of the job", "holdfast kill"])
def test_no_container_outlives_its_job(engine: tuple[str, dict[str, str]], tmp_path: Path, how: str) -> None:
    end_job_and_wait(engine, site(tmp_path, engine[0], rows=2000), how)


def end_job_and_wait(engine: tuple[str, dict[str, str]], folder: Path, how: str) -> None:
    """End a job in the midst of its work, and wait for the end of its containers."""
    env = engine[1] | {"HOLDFAST_HOME": str(folder / "home")}
    holdfast("eval", "-c", "nano", "--batch", "here", cwd=folder, env=env)
    (invocation,) = InvocationRegistry(folder / "home" / "invocations").all()
    place = TaskFolder(invocation.directory, 0)
    wait_for(lambda: read_state(Here(), place).done > 3, "trials")
    names = containers(engine)
    assert names and all(invocation.id in name for name in names)
    job = read_state(Here(), place).job
    assert job is not None
    if how == "holdfast kill":
        holdfast("kill", invocation.id, cwd=folder, env=env)
    else:
        os.kill(int(job.partition("-")[0]), signal.SIGKILL)
    wait_for(lambda: not containers(engine), "the end of the container")
    assert not list(folder.rglob("metrics.json")), "they worked to the end"


def tasks_in_image(folder: Path, engine: str, rows: int, seconds: float = 0) -> dict[str, Any]:
    """A configuration whose task runs in the image, and asks a Python function what it sees there."""
    (folder / "seen.py").write_text(
        "import os, time\n"
        "def reply(prompt):\n"
        f"    time.sleep({seconds})\n"
        "    inside = os.path.exists('/only-in-the-image')\n"
        '    return f\'{inside} {os.environ["COLOUR"]} {os.environ["SHADE"]} {"OUTSIDE" in os.environ}\'\n'
    )
    write_eval(
        folder,
        "http://127.0.0.1:1/v1",
        rows=rows,
        target={"python": "seen.py:reply"},
        limits={"concurrency": 1},
        graders=[{"type": "exact", "expected": "True image light False"}],
    )
    (folder / "env.toml").write_text('[here]\nexecutor = "local"\n')
    return {
        "execution": {
            "type": "local",
            "workers": 2,
            "container_engine": engine,
            "mounts": {"evaluation": {path: f"{path}:ro" for path in SYSTEM}},
        },
        "deployment": {"type": "none"},
        "evaluation": {"tasks": [{"name": "e.yaml", "container": IMAGE, "env_vars": {"SHADE": "lit:light"}}]},
    }


def test_a_local_task_runs_in_its_image_with_its_variables_and_mounts(
    engine: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    config = tasks_in_image(tmp_path, engine[0], rows=6)
    (tmp_path / "nano.yaml").write_text(json.dumps(config))
    env = {**engine[1], "OUTSIDE": "yes"}
    output = holdfast("eval", "-c", "nano", "--run", "here", cwd=tmp_path, env=env).stdout
    assert "coverage 100.0% of 6 trials" in output
    (metrics,) = tmp_path.glob("runs/*/*/metrics.json")
    assert json.loads(metrics.read_text())["passed"] == 1, "the evaluation ran elsewhere"
    wait_for(lambda: not containers(engine), "the end of the containers")


def test_an_image_without_an_interpreter_is_named_in_the_reason(
    engine: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    config = tasks_in_image(tmp_path, engine[0], rows=1)
    config["execution"]["mounts"] = {}  # so there is no libc
    (tmp_path / "nano.yaml").write_text(json.dumps(config))
    output = holdfast("eval", "-c", "nano", "--run", "here", cwd=tmp_path, env=engine[1], check=3).stdout
    assert f"could not be prepared in {IMAGE}" in output


@pytest.mark.faults
@pytest.mark.parametrize("how", ["kill -9 of the job", "holdfast kill"])
def test_no_container_of_a_task_outlives_its_job(engine: tuple[str, dict[str, str]], tmp_path: Path, how: str) -> None:
    config = tasks_in_image(tmp_path, engine[0], rows=2000, seconds=0.05)
    (tmp_path / "nano.yaml").write_text(json.dumps(config))
    end_job_and_wait(engine, tmp_path, how)


@pytest.mark.parametrize("engine", ["podman", "docker"])
def test_the_command_of_a_container_has_names_of_variables_and_no_values(engine: str) -> None:
    server = Server(
        command="serve",
        image="docker://registry.example.com/served:2",
        engine=engine,
        mounts=("/models:/checkpoint:ro",),
        env={"HF_TOKEN": "host:HF_TOKEN"},
        engine_options=("--shm-size=16g",),
    )
    words = server_words(server, "holdfast-1", ["HF_TOKEN", "HOLDFAST_PORT"], gpus=True)
    assert words[:2] == [engine, "run"] and words[-2:] == ["--shm-size=16g", "registry.example.com/served:2"]
    assert {"--env=HF_TOKEN", "--env=HOLDFAST_PORT", "--volume=/models:/checkpoint:ro", "--network=host"} <= set(words)
    assert words[6] == ("--gpus=all" if engine == "docker" else "--device=nvidia.com/gpu=all")
