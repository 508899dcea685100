"""Read `env.toml`, which says where to run: one table per profile, with `extends`, and the line of every key."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from holdfast.apps.cluster.config.executor import executor_problem, load_executor
from holdfast.apps.cluster.config.schema import ProfileBlock, WandbBlock
from holdfast.apps.cluster.config.tree import Tree, tree_of
from holdfast.errors import ConfigError, Problem, UsageError, suggest
from holdfast.spec.document import Document
from holdfast.spec.schema import validate_block

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.apps.cluster.config.executor import ExecutorRules
    from holdfast.spec.document import Location

FILE_VARIABLES = ("HOLDFAST_ENV_FILE", "NEMOTRON_ENV_FILE")
RESERVED = ("wandb", "cli", "cache", "artifacts")
"""tables of env.toml that are not profiles"""
OTHER_KEYS = (
    *("base_url", "kube_apiserver_url", "client_id", "app_id", "client_secret", "app_secret", "project_name"),
    *("pvc_nemo_run_dir", "nprocs_per_node", "pvcs", "distributed_framework", "custom_spec", "nemo_run_dir"),
    *("resource_shape", "node_group", "node_reservation", "shared_memory_size", "image_pull_secrets"),
    "pre_launch_commands",
)
"""keys of profiles for dgxcloud and lepton, which have no effect here; some are secrets, so none is kept"""


@dataclass(frozen=True)
class Profile:
    """A profile with all it inherits, and the line of each key."""

    name: str
    file: str
    """the name of env.toml in messages"""
    line: int
    """of its table"""
    fields: ProfileBlock
    values: dict[str, Any] = field(default_factory=dict)
    """the keys of this profile and of those it extends"""
    origins: dict[str, str] = field(default_factory=dict)
    """`env.toml:12` for each of them"""
    wandb: WandbBlock = field(default_factory=WandbBlock)
    wandb_origins: dict[str, str] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    """keys for other executors"""

    @property
    def place(self) -> str:
        """Its place in messages."""
        return f"{self.file}:{self.line}"


def find_env_file(cwd: Path, environ: Mapping[str, str]) -> Path | None:
    """Return the file that a variable names, or else the nearest env.toml, up to the folder with pyproject.toml."""
    for variable in FILE_VARIABLES:
        if environ.get(variable):
            path = cwd / Path(environ[variable]).expanduser()
            if not path.is_file():
                raise UsageError(f"${variable} points to {path}, which does not exist")
            return path
    for folder in (cwd, *cwd.parents):
        if (folder / "env.toml").is_file():
            return folder / "env.toml"
        if (folder / "pyproject.toml").is_file():
            return None
    return None


def load_profile(name: str, cwd: Path, environ: Mapping[str, str]) -> Profile:
    """Load the profile of that name; ConfigError with everything that is wrong, by file and line."""
    path = find_env_file(cwd, environ)
    if path is None:
        raise UsageError(
            f"profile {name!r}: no env.toml in {cwd} or its parents, up to the folder with pyproject.toml",
            remedy=f'Write one with a table [{name}] and executor = "slurm" or "local", '
            f"or name the file in ${FILE_VARIABLES[0]}.",
        )
    return read_profile(path, name, display_path(path, cwd))


def load_wandb(cwd: Path, environ: Mapping[str, str]) -> tuple[WandbBlock, dict[str, str]]:
    """Load only `[wandb]`, for a configuration that is run without a profile."""
    path = find_env_file(cwd, environ)
    problems: list[Problem] = []
    wandb = (WandbBlock(), {}) if path is None else _wandb(_read(path, display_path(path, cwd)), problems)
    if problems:
        raise ConfigError(problems)
    return wandb


def read_profile(path: Path, name: str, file: str) -> Profile:
    """Read a profile of a file."""
    tree = _read(path, file)
    names = [key for key, value in tree.data.items() if isinstance(value, dict) and key not in RESERVED]
    if name not in names:
        what = f"[{name}] is not a profile" if name in RESERVED else f"no profile {name!r}{suggest(name, names)}"
        listed = f"profiles there: {', '.join(names)}" if names else "it has no profiles"
        raise ConfigError([Problem(tree.origin((name,)) or file, f"{what}; {listed}")])
    values, places = _inherited(tree, name, (), names)
    problems: list[Problem] = []
    executor = values.get("executor")
    header = tree.origin((name,))
    if executor is not None and (message := executor_problem(executor)):
        raise ConfigError([Problem(places.where(("executor",)), message)])
    if executor is None:
        problems.append(Problem(f"{header}: [{name}]", 'executor is missing: write executor = "slurm" or "local"'))
    supported = {key: value for key, value in values.items() if key not in OTHER_KEYS}
    block = cast("ProfileBlock | None", validate_block(ProfileBlock, supported, (), places, problems))
    if executor is not None and not load_executor(executor).is_local and values.get("tunnel") == "ssh":
        problems.extend(
            Problem(f"{header}: [{name}]", f'{key} is missing: tunnel = "ssh" needs it')
            for key in ("host", "remote_job_dir")
            if not values.get(key)
        )
    wandb, wandb_origins = _wandb(tree, problems)
    if problems or block is None:
        raise ConfigError(problems)
    origins = {key: places.origin((key,)) for key in supported}
    line = int(header.rpartition(":")[2])
    foreign = tuple(sorted(set(values) - set(supported)))
    return Profile(name, file, line, block, supported, origins, wandb, wandb_origins, foreign)


def folder_problem(folder: str, executor: ExecutorRules) -> str | None:
    """Return the error message for a folder, or None. Jobs start elsewhere, and no shell expands `~name` for them."""
    if re.match(r"/|~(/|$)", folder) or (executor.shares_files and not folder.startswith("~")):
        return None
    where = "" if executor.shares_files else " is a folder of the cluster"
    return f"{folder!r}{where}: give an absolute path, or one that begins with ~/"


def squash_problem(profile: Profile | None) -> str | None:
    """Return why images cannot be imported with this profile, and what to write; None if they can."""
    if profile is None:
        return "images are imported on a cluster: name its profile with --run or --batch"
    required = {"executor": "slurm", "tunnel": "ssh", "host": None, "remote_job_dir": None}
    missing = [
        f'{key} = "{value or "…"}"'
        for key, value in required.items()
        if not profile.values.get(key) or (value and profile.values[key] != value)
    ]
    if not missing:
        return None
    return f"{profile.place}: [{profile.name}] cannot import images: it lacks {', '.join(missing)}"


def display_path(path: Path, cwd: Path) -> str:
    """Return a path for messages: relative to `cwd` if it is below."""
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


def _read(path: Path, file: str) -> Tree:
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"\(at line (\d+)", str(error))
        place = f"{file}:{match[1]}" if match else file
        raise ConfigError([Problem(place, f"not valid TOML: {error}")]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(file, f"cannot be read: {error}")]) from error
    return tree_of(Document(data, path, _lines(text, data)), file)


def _lines(text: str, data: dict[str, Any]) -> dict[Location, int]:
    """Return the line of each table and key. Lines of a text that only look like keys are not in the data."""
    tree = Tree(data)
    numbers: dict[Location, int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]\s*(#.*)?$", line):
            parts = _parts(header[1])
            if isinstance(tree.get(*parts), dict):
                table = parts
                for depth in range(1, len(parts) + 1):
                    numbers.setdefault(parts[:depth], number)
        elif key := re.match(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""", line):
            parts = (*table, *_parts(key[1]))
            if tree.get(*parts) is not None:
                for depth in range(len(table) + 1, len(parts) + 1):
                    numbers.setdefault(parts[:depth], number)
    return numbers


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(r"""[\w-]+|"[^"]*"|'[^']*'""", text))


def _inherited(tree: Tree, name: str, seen: tuple[str, ...], names: list[str]) -> tuple[dict[str, Any], Tree]:
    """Return the keys of a profile over those it extends, and their places."""
    if name in seen:
        raise ConfigError([Problem(tree.where((seen[0], "extends")), f"forms a cycle: {' → '.join((*seen, name))}")])
    own = Tree(dict(tree.data[name]), {k[1:]: place for k, place in tree.origins.items() if k[:1] == (name,) and k[1:]})
    parent = own.data.pop("extends", None)
    own.origins.pop(("extends",), None)
    if parent is None:
        return own.data, own
    if parent not in names:
        message = f"no profile {parent!r}{suggest(str(parent), names)}; profiles there: {', '.join(names)}"
        raise ConfigError([Problem(tree.where((name, "extends")), message)])
    _, base = _inherited(tree, parent, (*seen, name), names)
    merged = own.over(base)
    return merged.data, merged


def _wandb(tree: Tree, problems: list[Problem]) -> tuple[WandbBlock, dict[str, str]]:
    data = tree.get("wandb") or {}
    block = cast("WandbBlock | None", validate_block(WandbBlock, data, ("wandb",), tree, problems))
    return block or WandbBlock(), {key: tree.origin(("wandb", key)) for key in data} if isinstance(data, dict) else {}
