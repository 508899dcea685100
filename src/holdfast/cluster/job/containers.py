"""Start parts of a local job in their images, with podman or docker.

A part of the evaluation sees Holdfast, its interpreter, the files of its task, and the runs, under the same paths as
outside. It has the processes, the network and the host name of this machine too: locks of a run name their holders by
them.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import holdfast

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.cluster.config.launch import Container, TaskFile
    from holdfast.cluster.remote.invocation import TaskFolder

_SYSTEM: Final = Path("/usr")
"""the image's own; an interpreter in it is the image's, too"""


def container_name(task: TaskFile, part: str) -> str:
    """Return the name of the container of a part of a task."""
    return f"holdfast-{task.invocation}-{task.number}-{part}"


def container_words(container: Container, name: str, variables: Iterable[str], options: Iterable[str]) -> list[str]:
    """Return the words before a command that start it in an image, on the network of this machine.

    Values of variables come from the environment of the command, so that no argument contains a secret.
    """
    words = [container.engine, "run", "--rm", f"--name={name}", "--network=host", "--entrypoint=", *options]
    words += [f"--volume={mount}" for mount in container.mounts]
    words += [f"--env={variable}" for variable in variables]
    return [*words, *container.options, container.image.removeprefix("docker://")]


def removal(engine: str, name: str) -> str:
    """Return shell commands that end a container, if there is one: SIGTERM, after ten seconds SIGKILL."""
    return f"{engine} stop --time=10 {name} >/dev/null 2>&1; {engine} rm --force {name} >/dev/null 2>&1"


def evaluation_words(task: TaskFile, place: TaskFolder, part: str, variables: Iterable[str]) -> tuple[list[str], str]:
    """Return the words before a command of the evaluation, and the name of its container; none if it has no image."""
    container = task.container
    if container is None:
        return [], ""
    options = ["--interactive", "--pid=host", "--uts=host"]
    if container.engine == "docker":  # whose processes would be root's
        options.append(f"--user={os.getuid()}:{os.getgid()}")
    Path(task.runs_dir).mkdir(parents=True, exist_ok=True)
    bundles = Path(place.invocation).parent / "bundles"
    options += [f"--volume={path}:{path}" for path in (place.path, task.runs_dir)]
    options += [f"--volume={path}:{path}:ro" for path in (bundles, *_interpreter_folders())]
    name = container_name(task, f"{part}-{secrets.token_hex(4)}")  # one that still ends may have the same part
    own = [*variables, *(variable for variable in os.environ if variable.startswith("HOLDFAST_"))]
    return container_words(container, name, dict.fromkeys(own), options), name


def _interpreter_folders() -> list[Path]:
    """List the folders of this interpreter and of Holdfast, without those inside others."""
    packages = Path(holdfast.__file__).parents[1]
    prefixes = [Path(prefix) for prefix in (sys.prefix, sys.base_prefix) if Path(prefix) != _SYSTEM]
    folders = {path for prefix in (*prefixes, packages) for path in (prefix, prefix.resolve())}
    return sorted(path for path in folders if not any(other in path.parents for other in folders))
