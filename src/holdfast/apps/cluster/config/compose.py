"""Compose a configuration: `defaults:` lists, the command line, the profile, interpolation; in that order.

Precedence, highest first: the command line; the configuration's own `run.env` for the image and the size of the job
(`PREFERRED`); the profile; the configuration; the defaults of the groups it selects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.apps.cluster.config.executor import EXECUTORS
from holdfast.apps.cluster.config.profiles import Profile, display_path, load_wandb
from holdfast.apps.cluster.config.schema import BASE_COMMAND, LaunchBlock, ProfileBlock, WandbBlock
from holdfast.apps.cluster.config.tree import (
    COMMAND_LINE,
    DEFAULT,
    MANDATORY,
    Resolved,
    Tree,
    interpolate,
    leaves,
    tree_of,
    walk,
)
from holdfast.errors import ConfigError, Problem, UsageError, suggest
from holdfast.spec.document import Document, Location, format_location, parse_document, read_document, read_text
from holdfast.spec.formats import find_file, installed_providers, is_eval
from holdfast.spec.load import parse_override
from holdfast.spec.suite import find_evals
from holdfast.store.files import slug

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from holdfast.spec.document import Document
    from holdfast.spec.suite import Suite


GROUPS = Path(__file__).parent / "groups"
GROUPED = ("execution", "deployment")
"""sections with built-in groups of defaults"""
PREFERRED = ("container_image", "nodes", "gpus_per_node", "ntasks_per_node", "nproc_per_node")
"""keys of run.env for which the configuration wins over the profile"""
KNOWN_BY_PROFILE = {
    "hostname": "host",
    "username": "user",
    "account": "account",
    "partition": "partition",
    "walltime": "time",
}
"""keys of `execution`, and the profile's key that replaces a `???` there"""
CONFIG_VARIABLE = "HOLDFAST_CONFIG_DIR"
SECTIONS = ("execution", "deployment", "evaluation")
REWRITTEN = ("services", "benchmarks")
"""sections that the rewritten NeMo Evaluator has instead"""
UNSELECTED: dict[Location, Any] = {
    ("execution", "gres"): None,
    ("execution", "sbatch_extra_flags"): {},
    ("deployment", "tensor_parallel_size"): 1,
}
"""values of a group that no `defaults:` list selects: such a launch asks only for what it names"""


def find_config(config: str | Path, cwd: Path, environ: Mapping[str, str]) -> Path:
    """Find a configuration by its path (with a `/` or `.yaml`), or by its name.

    Names are looked up in $HOLDFAST_CONFIG_DIR, else in ./config and here; then among benchmarks and the
    tasks of installed packages.
    """
    text = str(config)
    if "/" in text or text.endswith((".yaml", ".yml")):
        path = cwd / Path(text).expanduser()
        if not path.is_file():
            raise UsageError(f"configuration {text}: no such file")
        return path
    variable = environ.get(CONFIG_VARIABLE)
    folders = [cwd / Path(variable).expanduser()] if variable else [cwd / "config", cwd]
    for folder in folders:
        for ending in (".yaml", ".yml"):
            if (folder / f"{text}{ending}").is_file():
                return folder / f"{text}{ending}"
    if (task := find_file(text, installed_providers())) is not None:
        return task
    names = sorted({path.stem for folder in folders for path in folder.glob("*.y*ml")})
    raise UsageError(
        f"no configuration {text!r}{suggest(text, names)}: looked for {text}.yaml in {', '.join(map(str, folders))}",
        remedy=f"There are: {', '.join(names)}." if names else f"Give its path, or its folder in ${CONFIG_VARIABLE}.",
    )


def compose(
    path: Path,
    overrides: Sequence[str],
    profile: Profile | None,
    cwd: Path,
    environ: Mapping[str, str],
    *,
    detached: bool = False,
    suite: Suite | None = None,
    document: Document | None = None,
) -> Resolved:
    """Compose the configuration in `path`. An eval file is a configuration of one task, a suite one of several.

    `document` is the content of `path`, if the caller has read it. Only reads files; the same input gives the same
    result.
    """
    edits = [_edit(text) for text in overrides]
    choices = {edit.path[0]: str(edit.value) for edit in edits if edit.selects}
    edits = [edit for edit in edits if not edit.selects]

    files = _Files(path.parent, cwd, choices)
    if suite is None:
        document = document or read_config(path, cwd)
        tasks = _lone_task(document, path)
    else:
        tasks = _suite_tasks(suite)
    if tasks:
        tree = _wrap_evals(tasks, path, cwd)
        for section, choice in choices.items():  # a built-in group, which has the name of its type
            tree.put((section, "type"), choice.partition("/")[0], COMMAND_LINE)
    else:
        tree = files.read(_Layer(path), document)
    tree.origins[()] = files.name(path)
    _refuse_other_dialects(tree)
    _prepare_run(tree)
    tree = _add_defaults_of_types(tree, edits, profile, files.selected)
    for edit in edits:
        edit.apply(tree)
    tree = _add_defaults_of_auxiliaries(tree)
    _merge_profile(tree, profile, cwd, environ, detached=detached)
    _fill_in(tree)
    _mark_base_command(tree)

    place = None if profile is None else f"[{profile.name}] ({profile.place})"
    return interpolate(tree, environ, place)


def _refuse_other_dialects(tree: Tree) -> None:
    """Raise an error for a configuration of the rewritten NeMo Evaluator, which has other sections."""
    if tree.data.keys().isdisjoint(SECTIONS) and (keys := [key for key in REWRITTEN if key in tree.data]):
        listed = ", ".join(key for key in (*REWRITTEN, "cluster") if key in tree.data)
        message = f"is of NeMo Evaluator 0.3 and newer (it has {listed}), which is not supported"
        raise ConfigError(
            [Problem(tree.where((keys[0],)), message)],
            remedy="Write it as one of nemo-evaluator-launcher: execution (from cluster), deployment or target (from "
            "services), and evaluation.tasks (from benchmarks).",
        )


class _Layer(NamedTuple):
    """A file to build on."""

    path: Path
    group: tuple[str, ...] = ()
    """the folder in which its own groups are looked up"""
    package: tuple[str, ...] | None = ()
    """the key that its values go under; None: the key of the file that names it"""


class _Files:
    """Reads files that name each other in their `defaults:`."""

    def __init__(self, folder: Path, cwd: Path, choices: dict[str, str]) -> None:
        self.roots = (folder, GROUPS)
        self.cwd = cwd
        self.choices = choices
        self.selected: set[tuple[str, str]] = set()
        """the built-in groups that were used, as (section, file)"""
        self.reading: tuple[Path, ...] = ()

    def read(self, layer: _Layer, document: Document | None = None) -> Tree:
        """Read a file with all it builds on, under its package. `document` is its content, if that was read."""
        path, name = layer.path, self.name(layer.path)
        if path in self.reading:
            cycle = " → ".join(self.name(file) for file in (*self.reading, path))
            raise ConfigError([Problem(name, f"its defaults form a cycle: {cycle}")])
        builtin = path.is_relative_to(GROUPS)
        document = document or (_read_group(path) if builtin else _read(path, name))
        listed = document.data.pop("defaults", None)
        own = tree_of(document, name, lines=not builtin).at(layer.package or ())
        outer, self.reading = self.reading, (*self.reading, path)
        tree, has_own = Tree(), False
        for number, entry in enumerate(self._entries(listed, document)):
            place = document.where(("defaults", number))
            if entry == "_self_":
                if has_own:
                    raise ConfigError([Problem(place, "a second _self_")])
                has_own, tree = True, own.over(tree)
                continue
            for base in self._layers(entry, layer, place):
                tree = self.read(base if base.package is not None else base._replace(package=layer.package)).over(tree)
        self.reading = outer
        return tree if has_own else own.over(tree)

    def _entries(self, listed: Any, document: Document) -> list[Any]:
        """Return the entries of a `defaults:` list; in the first file also the groups that only the command names."""
        entries = [listed] if isinstance(listed, str) else listed or []
        if not isinstance(entries, list):
            raise ConfigError([Problem(document.where(("defaults",)), "must be a list of groups and files")])
        if len(self.reading) > 1:
            return entries
        named = {str(key) for entry in entries if isinstance(entry, dict) for key in entry}
        return [*({key: value} for key, value in self.choices.items() if key not in named), *entries]

    def _layers(self, entry: Any, inside: _Layer, place: str) -> Iterator[_Layer]:
        """Yield the files that an entry of a `defaults:` list stands for."""
        if isinstance(entry, str):
            name, _, package = entry.partition("@")
            key, _, choice = name.rpartition("/")
            if package and key:  # `deployment/vllm@auxiliary_deployments.judge` puts a group under that key
                yield from self._select(f"{key}@{package}", choice, inside.group, place)
            else:
                path = self._find_file(name, inside.path.parent, place)
                yield _Layer(path, inside.group, tuple(package.split(".")) if package else None)
        elif isinstance(entry, dict) and len(entry) == 1:
            ((key, value),) = entry.items()
            if not inside.group and key in self.choices:
                value = self.choices[key]
            for choice in value if isinstance(value, list) else [] if value is None else [value]:
                yield from self._select(str(key), str(choice), inside.group, place)
        else:
            raise ConfigError([Problem(place, "an entry must be a file's name, `group: name` or _self_")])

    def _find_file(self, entry: str, folder: Path, place: str) -> Path:
        """Return a file to build on, from the folder of the file that names it."""
        name = entry if entry.endswith((".yaml", ".yml")) else f"{entry}.yaml"
        if (folder / name).is_file():
            return folder / name
        group, _, choice = entry.strip("/").partition("/")
        hint = f"; the group is written `{group}: {choice}`" if group in GROUPED and choice else ""
        raise ConfigError([Problem(place, f"no file {folder / name}{hint}")])

    def _select(self, key: str, choice: str, group: tuple[str, ...], place: str) -> list[_Layer]:
        """Return the selected file of a group; none if there is no such file and the group is `optional`."""
        *words, key = key.split()
        if words not in ([], ["optional"]):
            message = f"`{words[0]} {key}` is not supported: write `{key}: {choice}` in place"
            raise ConfigError([Problem(place, message)])
        name, _, package = key.partition("@")
        parts = (*(() if name.startswith("/") else group), *name.strip("/").split("/"))
        path = self._find_choice(parts, choice)
        if path is None:
            if words:
                return []
            raise self._unknown_choice(parts, choice, place)
        if path.is_relative_to(GROUPS) and not package:
            self.selected.add((parts[0], path.relative_to(GROUPS.joinpath(*parts)).parts[0].removesuffix(".yaml")))
        return [_Layer(path, parts, tuple(package.split(".")) if package else parts)]

    def _find_choice(self, parts: tuple[str, ...], choice: str) -> Path | None:
        """Return the file of a group: the user's own, else the built-in one."""
        for root in self.roots:
            folder = root.joinpath(*parts)
            for path in (folder / f"{choice}.yaml", folder / choice / "default.yaml", folder / choice):
                if path.is_file():
                    return path
        return None

    def _unknown_choice(self, parts: tuple[str, ...], choice: str, place: str) -> ConfigError:
        folders = [root.joinpath(*parts) for root in self.roots]
        choices = sorted({_choice(path, folder) for folder in folders for path in folder.rglob("*.yaml")})
        message = f"no {choice!r} in the group {'/'.join(parts)}{suggest(choice, choices)}"
        listed = f"; there are: {', '.join(choices)}" if choices else f"; looked in {folders[0]}"
        return ConfigError([Problem(place, message + listed)])

    def name(self, path: Path) -> str:
        """Return the name of a file in messages; for a built-in group, the name of the group."""
        if path.is_relative_to(GROUPS):
            return f"{DEFAULT}{path.relative_to(GROUPS).with_suffix('')})"
        return display_path(path, self.cwd)


@dataclass(frozen=True)
class _Edit:
    """One override from the command line."""

    path: tuple[str, ...]
    value: Any
    delete: bool = False

    @property
    def selects(self) -> bool:
        """True if it selects a group, as `deployment=vllm` does."""
        return len(self.path) == 1 and self.path[0] in GROUPED and isinstance(self.value, str) and not self.delete

    def apply(self, tree: Tree) -> None:
        for location in _locations(tree, self.path):
            if not self.delete:
                tree.put(location, self.value, COMMAND_LINE)
            elif isinstance(holder := tree.get(*location[:-1]), dict) and location[-1] in holder:
                tree.remove(location)
            else:
                raise UsageError(f"~{'.'.join(self.path)}: there is nothing to remove")


def _edit(text: str) -> _Edit:
    """Parse `a.b=c`, with Hydra's `+` and `++` (which have no effect here) or `~` to remove a key."""
    if text.startswith("~"):
        path = text[1:].partition("=")[0]
        if not path or not all(path.split(".")):
            raise UsageError(f"{text!r} is not an override", remedy="Write ~a.b to remove the key a.b.")
        return _Edit(tuple(path.split(".")), None, delete=True)
    path_parts, value = parse_override(text.lstrip("+"))
    return _Edit(path_parts, value)


def _locations(tree: Tree, path: tuple[str, ...]) -> list[Location]:
    """Return the locations of a path. In a list it takes a number or a name, and a name may match several entries."""
    places: list[Location] = [()]
    rest = path
    while rest:
        node = tree.get(*places[0])
        if isinstance(node, list):
            taken, numbers = _named(node, rest)
            if not numbers:
                names = [inner.get("name") if isinstance(inner, dict) else inner for inner in node]
                listed = f"{format_location(places[0])} has {', '.join(map(str, names)) or 'nothing'}"
                raise UsageError(f"{'.'.join(path)}: there is no such entry; {listed}")
            places, rest = [(*place, number) for place in places for number in numbers], rest[taken:]
        else:
            places, rest = [(*place, rest[0]) for place in places], rest[1:]
    return places


def _named(node: list[Any], rest: tuple[str, ...]) -> tuple[int, list[int]]:
    """Return how many parts of the path name entries of a list (a name may contain dots), and which entries."""
    for taken in range(1, len(rest) + 1):
        name = ".".join(rest[:taken])
        matches = [
            at for at, inner in enumerate(node) if name in (inner, inner.get("name") if isinstance(inner, dict) else 0)
        ]
        if matches:
            return taken, matches
    return 1, [int(rest[0])] if rest[0].isdigit() and int(rest[0]) < len(node) else []


def _choice(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder).with_suffix("")).removesuffix("/default")


def read_config(path: Path, cwd: Path) -> Document:
    """Read a configuration, or an eval file used as one."""
    return _read(path, display_path(path, cwd))


def _read(path: Path, name: str) -> Document:
    shape = "a configuration must be a mapping of keys such as defaults, execution, deployment, evaluation"
    return parse_document(read_text(path), Path(name), shape)


def _read_group(path: Path) -> Document:
    """Read a built-in group. Groups never change, and parsing them would take longer than everything else."""
    document = _parse_group(path)
    return replace(document, data=dict(document.data))


@cache
def _parse_group(path: Path) -> Document:
    return read_document(path)


def _prepare_run(tree: Tree) -> None:
    """Make sure that `run.env` and `run.wandb` exist, and that the image has one name."""
    _check_mapping(tree, "run")
    for part in ("env", "wandb"):
        _check_mapping(tree, "run", part)
        if tree.get("run", part) is None:
            tree.put(("run", part), {}, tree.origin(()))
    container, origin = tree.get("run", "env", "container"), tree.origin(("run", "env", "container"))
    same = tree.get("run", "env", "container_image") in (None, container)
    if container is not None and (same or origin == COMMAND_LINE):
        tree.put(("run", "env", "container_image"), container, origin)
        tree.remove(("run", "env", "container"))


def _check_mapping(tree: Tree, *location: str) -> None:
    """Raise ConfigError if a section that is merged is not a mapping; the sections are validated later."""
    block = tree.get(*location)
    if block is not None and not isinstance(block, dict):
        raise ConfigError([Problem(tree.where(location), f"must be a mapping of keys, not {block!r}")])


def _add_defaults_of_types(
    tree: Tree, edits: list[_Edit], profile: Profile | None, selected: set[tuple[str, str]]
) -> Tree:
    """Add the defaults of the types that are used, below everything, also if no `defaults:` list names them."""
    _choose_executor(tree, profile)
    values = {edit.path: edit.value for edit in edits}
    for section in reversed(GROUPED):  # so that the first comes first
        kind = values.get((section, "type"), tree.get(section, "type"))
        _check_mapping(tree, section)
        if kind is None:
            raise missing_type(tree, section)
        name = str(kind) if (GROUPS / section / f"{kind}.yaml").is_file() else f"{kind}/default"
        path = GROUPS / section / f"{name}.yaml"
        if (section, str(kind)) in selected or not path.is_file():
            continue  # an unknown type is reported when the section is checked
        tree = tree.over(_group_of_type(path, f"{section}/{name}", section, (section,)))
    return tree


def _choose_executor(tree: Tree, profile: Profile | None) -> None:
    """Set `execution.type` to the profile's executor, or else to `run.env.executor` unless a type is written."""
    executor, place = (None, "") if profile is None else (profile.fields.executor, profile.origins["executor"])
    if executor is None and tree.get("execution", "type") is None:
        executor, place = tree.get("run", "env", "executor"), tree.origin(("run", "env", "executor"))
    if executor and isinstance(tree.get("execution"), dict | None):
        tree.put(("execution", "type"), executor, place)


def _group_of_type(path: Path, name: str, section: str, location: tuple[str, ...]) -> Tree:
    """Return the defaults of a type, as they are without a `defaults:` list, under a location."""
    place = f"{DEFAULT}{name})"
    base = tree_of(_read_group(path), place, lines=False)
    for (group, *key), value in UNSELECTED.items():
        if group == section and base.get(*key) is not None:
            base.put(tuple(key), value, place)
    return base.at(location)


def _add_defaults_of_auxiliaries(tree: Tree) -> Tree:
    """Add the defaults of auxiliary servers."""
    named = tree.get("auxiliary_deployments")
    if not isinstance(named, dict):
        return tree
    below = Tree()
    for name, block in list(named.items()):  # all of them, which keeps their order
        here: tuple[str, ...] = ("auxiliary_deployments", name)
        if isinstance(block, dict) and block.get("type") == "none":
            tree.put(here, {"type": "none"}, tree.origin((*here, "type")))  # so that no other key of it is required
        below.put(here, {}, tree.origin(here))
        path = GROUPS / "deployment" / f"{block.get('type') if isinstance(block, dict) else None}.yaml"
        if path.is_file():
            below = _group_of_type(path, f"deployment/{path.stem}", "deployment", here).over(below)
    return tree.over(below)


def missing_type(tree: Tree, section: str) -> ConfigError:
    """Return the error for a section without a type, with what to write."""
    slurm = section == "execution"
    types = list(EXECUTORS) if slurm else sorted(path.stem for path in (GROUPS / section).glob("*.yaml"))
    group = f"{section}: {'slurm/default' if slurm else 'vllm'}"
    remedy = f"Write `{section}: {{type: …}}` with one of {', '.join(types)}"
    remedy += f"; or select its defaults: `defaults: [{{{group}}}, _self_]`"
    remedy += "; or name a profile whose executor is set, with --run." if slurm else "."
    where = tree.where((section,))
    message = f"missing key type: no group {section!r} is selected and no type given"
    sections = LaunchBlock.known_keys()
    misspelt = [key for key in tree.data if key not in sections]
    problems = [Problem(tree.where((key,)), f"unknown key{suggest(key, sections)}") for key in misspelt]
    return ConfigError([*problems, Problem(where, message)], remedy=remedy)


def _merge_profile(
    tree: Tree, profile: Profile | None, cwd: Path, environ: Mapping[str, str], *, detached: bool
) -> None:
    """Merge the profile into `run.env` and `run.wandb`, with the precedence at the top of this file.

    All their keys exist afterwards, so that values may refer to them.
    """
    _prepare_run(tree)  # the command line may have set `container`
    for key, (value, origin) in {} if profile is None else _effective(profile, detached=detached).items():
        _merge_key(tree, key, value, origin)
    wandb, places = (profile.wandb, profile.wandb_origins) if profile else load_wandb(cwd, environ)
    for key, place in places.items():
        if tree.origins.get(("run", "wandb", key)) != COMMAND_LINE:
            tree.put(("run", "wandb", key), getattr(wandb, key), place)
    for part, names in (("env", ProfileBlock.known_keys()), ("wandb", [*WandbBlock.model_fields])):
        block = tree.get("run", part)
        if isinstance(block, dict):
            block |= {name: None for name in names if name not in block and name != "container"}
    image: Location = ("run", "env", "container_image")
    if tree.get("run", "env", "container") is None:
        tree.put(("run", "env", "container"), tree.get(*image), tree.origin(image))


def _merge_key(tree: Tree, key: str, value: Any, origin: str) -> None:
    """Merge one key of the profile into `run.env`: variables one by one; mounts are added."""
    here: Location = ("run", "env", key)
    present, place = tree.get(*here), tree.origins.get(here, "")
    if key == "env_vars" and isinstance(present, dict | None):
        for name, text in value.items():
            if tree.origins.get((*here, name)) != COMMAND_LINE:
                tree.put((*here, name), text, origin)
    elif place == COMMAND_LINE and present is not None:
        return
    elif key == "mounts" and isinstance(present, list):
        for mount in [mount for mount in value if mount not in present]:
            tree.origins[(*here, len(present))] = origin
            present.append(mount)
    elif key not in PREFERRED or present is None:
        tree.put(here, value, origin)


def _fill_in(tree: Tree) -> None:
    """Fill in the `???` of an execution with the values of the profile."""
    answers = {key: ("run", "env", name) for key, name in KNOWN_BY_PROFILE.items()}
    for key, source in {**answers, "output_dir": ("run", "env", "remote_job_dir")}.items():
        value = tree.get(*source)
        if tree.get("execution", key) == MANDATORY and value not in (None, MANDATORY):
            answer = f"{value}/evaluations" if key == "output_dir" else value
            tree.put(("execution", key), answer, tree.origin(source))


def _mark_base_command(tree: Tree) -> None:
    """Let values refer to the derived command of the server, which `fill_base_command` puts in later."""
    location = ("deployment", "base_command")
    referenced = any(isinstance(text, str) and "${deployment.base_command}" in text for _, text in leaves(tree.data))
    if referenced and tree.get(*location) is None:
        tree.put(location, BASE_COMMAND, tree.origin(("deployment", "type")))


def _effective(profile: Profile, *, detached: bool) -> dict[str, tuple[Any, str]]:
    """Return the profile's keys with their places; one name for the image, and the partition for --run or --batch."""
    values = {key: (value, profile.origins[key]) for key, value in profile.values.items()}
    if "container" in values:
        values.setdefault("container_image", values.pop("container"))
        values.pop("container", None)
    key = "batch_partition" if detached else "run_partition"
    if key in values:
        values["partition"] = values[key]
    return values


OUTER = ("run", "execution", "deployment", "evaluation", "export", "env_vars")
"""sections whose overrides change the configuration around an eval file, and not the eval"""


def _lone_task(document: Document, path: Path) -> list[dict[str, Any]]:
    """Return the task that an eval file stands for; no task for a configuration."""
    return [{"name": _name_of(document, path), "eval": str(path.resolve())}] if is_eval(document.data) else []


def _suite_tasks(suite: Suite) -> list[dict[str, Any]]:
    """Return a task for each eval and target of a suite."""
    tasks = []
    for path, entry in zip(find_evals(suite), suite.evals, strict=True):
        document = read_document(path)
        name, written = entry.name or _name_of(document, path), document.data.get("target")
        for target in suite.targets or (None,):
            changes = {} if target is None else {".".join(key): value for key, value in target.overrides(written)}
            overrides = {**suite.overrides, **entry.overrides, **changes}
            task = name if target is None or len(suite.targets) == 1 else f"{name}-{slug(target.label)}"
            tasks.append({"name": task, "eval": str(path.resolve()), "overrides": overrides})
    return tasks


def _name_of(document: Document, path: Path) -> str:
    name = document.data.get("name")
    return name if isinstance(name, str) and name.strip() else path.stem


def _wrap_evals(tasks: list[dict[str, Any]], path: Path, cwd: Path) -> Tree:
    """Return the configuration of a launch that names only eval files."""
    data = {"execution": {}, "deployment": {"type": "none"}, "evaluation": {"tasks": tasks}}
    file = display_path(path, cwd)
    return Tree(data, {location: file for location, _ in walk(data, ()) if location})


def split_overrides(overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """Separate the overrides of the configuration around an eval file from the eval's own."""
    outer: list[str] = []
    inner: list[str] = []
    for text in overrides:
        path = text.lstrip("+~").partition("=")[0].split(".")
        ours = path[0] in OUTER or path[:2] == ["target", "api_endpoint"]
        (outer if ours else inner).append(text)
    return outer, inner
