"""`evaluation.tasks`: each is an eval file, of any kind that `holdfast eval` reads, with values laid over it.

A name is looked up as a file first, then asked of the providers that other packages register as entry points of the
group `holdfast.tasks`: functions that take a name and give the path of an eval file, or None.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from holdfast.cluster.config.legacy import MOVED_IN_TASKS, adapter_overrides, in_newer_words
from holdfast.cluster.config.provenance import Tree
from holdfast.cluster.config.schema import ApiEndpoint, EvaluatorConfig, Params, TaskBlock
from holdfast.cluster.config.servers import api_root
from holdfast.cluster.config.variables import EnvVar, check_keys, read_variables
from holdfast.errors import ConfigError, HoldfastError, Problem, UsageError
from holdfast.formats import find_format, load_any
from holdfast.spec.document import read_document
from holdfast.spec.load_targets import TARGETS
from holdfast.spec.validation import suggest, validate_block

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.spec.document import Document, Location
    from holdfast.spec.load import Eval
    from holdfast.spec.overrides import Override

ENTRY_POINTS = "holdfast.tasks"
OLDER = ("config.", "target.api_endpoint.")
"""how overrides of a task begin that are meant for nemo_evaluator_config"""
PARAMS = {
    "limit_samples": ("dataset", "limit"),
    "max_new_tokens": ("target", "params", "max_tokens"),
    "temperature": ("target", "params", "temperature"),
    "top_p": ("target", "params", "top_p"),
    "parallelism": ("limits", "concurrency"),
    "request_timeout": ("limits", "turn_timeout"),
    "max_retries": ("limits", "retries"),
}
"""params of a task, and the key of the eval file each one is"""


class TaskProvider(Protocol):
    """Knows tasks by name."""

    def __call__(self, name: str) -> Path | None:
        """The eval file of that task, or None."""


@dataclass(frozen=True)
class Endpoint:
    """The model to measure, as far as it is known before anything is started."""

    model: str | None = None
    """None: the eval files say themselves what they measure"""
    base_url: str | None = None
    """None: of the server that is started"""
    api_key_env: str | None = None
    type: str | None = None
    """chat, completions …; a task may ask for another"""
    stream: bool | None = None
    version: str | None = None
    """what the server serves; in the keys of its replies, unless the eval has a `target.version` of its own"""


@dataclass(frozen=True)
class Task:
    """One eval to run, with what is laid over its file."""

    name: str
    number: int
    """among the tasks of this name, from 0"""
    eval_file: Path
    overrides: tuple[Override, ...]
    """as `holdfast eval FILE key=value …` would get them"""
    spec: Eval = field(repr=False, compare=False)
    """what both make: it was checked, so it is what is sent"""
    translated: bool = False
    """the file is another tool's, and `spec` what was made of it"""
    twin: bool = False
    """a task before it is the same run: what sets that aside, or takes up its errors, is for the first alone"""
    env: tuple[EnvVar, ...] = ()
    pre_cmd: str | None = None
    post_cmd: str | None = None

    @property
    def id(self) -> str:
        """`gsm8k.0`: what `-t` takes to mean this one alone."""
        return f"{self.name}.{self.number}"

    def is_run_of(self, other: Task) -> bool:
        """Whether both ask the same of the same."""
        return (self.eval_file, self.overrides) == (other.eval_file, other.overrides)


@dataclass(frozen=True)
class TaskReader:
    """What all tasks of a configuration share while they are read."""

    tree: Tree
    endpoint: Endpoint
    shared_env: dict[str, EnvVar]
    folder: Path
    """the configuration's"""
    cwd: Path
    providers: Sequence[TaskProvider]
    problems: list[Problem]
    notices: list[str]
    laid: tuple[Override, ...] = ()
    """over every eval file, from the command line: they have the last word"""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    serves: bool = False
    """whether the job serves the model that is measured"""

    def read(self, wanted: Sequence[str]) -> tuple[Task, ...]:
        """The tasks that are wanted (all, if none is named), in their order."""
        blocks: list[tuple[int, TaskBlock]] = []
        listed = self.tree.get("evaluation", "tasks")
        for at, raw in enumerate(listed if isinstance(listed, list) else []):  # its block has said what is wrong
            given = {"name": raw} if isinstance(raw, str) else raw
            place: Location = ("evaluation", "tasks", at)
            block = cast("TaskBlock | None", validate_block(TaskBlock, given, place, self.tree, self.problems))
            if block is not None:
                blocks.append((at, block))
        numbered: list[tuple[int, int, TaskBlock]] = []
        for at, block in blocks:
            numbered.append((at, sum(other.name == block.name for _, _, other in numbered), block))
        ids = {at: {block.name, Path(block.name).stem} for at, _, block in numbered}
        for at, number, _ in numbered:
            ids[at] |= {f"{name}.{number}" for name in ids[at]}
        for name in wanted:
            if not self.problems and not any(name in known for known in ids.values()):
                names = [block.name for _, block in blocks]
                raise UsageError(f"-t {name}: no such task{suggest(name, names)}; there are {', '.join(names)}")
        chosen = [entry for entry in numbered if not wanted or ids[entry[0]] & set(wanted)]
        tasks = [self.task(at, number, block) for at, number, block in chosen]
        found: list[Task] = []
        for task in tasks:
            if task is None:
                continue
            first = next((other for other in found if other.is_run_of(task)), None)
            if first is not None:
                said = f"the task {task.id} is the same run as {first.id}, whose results it finds: nothing is run twice"
                self.notices.append(f"{self.tree.where(('evaluation', 'tasks'))}: {said}")
            found.append(replace(task, twin=first is not None))
        return tuple(found)

    def task(self, at: int, number: int, block: TaskBlock) -> Task | None:
        place: Location = ("evaluation", "tasks", at)
        path = self.eval_file(block, (*place, "eval" if block.eval else "name"))
        document = None if path is None else self.document(path)
        translated = document is not None and find_format(document.data) is not None
        # Of the older dialect are keys that begin with `config.`, unless the eval file has such a block itself.
        older = OLDER[1:] if translated else OLDER
        config, values = self.config(place, block, older)
        env = {**self.shared_env, **read_variables(self.tree, (*place, "env_vars"), self.problems, self.notices)}
        if config is None or path is None or document is None:
            return None
        if block.container is not None:
            said = "container is not needed: Holdfast itself evaluates, in its own environment"
            self.notices.append(f"{self.tree.where(place)}: {said}")
        api_endpoint = config.target.api_endpoint
        if api_endpoint.api_key_name:
            env[api_endpoint.api_key_name] = EnvVar(api_endpoint.api_key_name, "host", api_endpoint.api_key_name)
        derived = [
            *self.target(block, api_endpoint, place),
            *self.params(config.config.params, values),
            *adapter_overrides(values, ("target", "api_endpoint", "adapter_config"), self.problems, self.notices),
        ]
        own: list[Override] = [(tuple(key.split(".")), value) for key, value in _own(block.overrides, older)]
        spec, overrides = self.checked(document, derived, [*own, *self.laid], place)
        if spec is None:
            return None
        check_keys(spec, env, self.environ, self.problems, self.notices, serves=self.serves)
        before, after = (self.tree.get("evaluation", key) for key in ("pre_cmd", "post_cmd"))
        return Task(
            name=block.name,
            number=number,
            eval_file=path,
            overrides=tuple(overrides),
            spec=spec,
            translated=translated,
            env=tuple(env.values()),
            pre_cmd=block.pre_cmd or before,
            post_cmd=block.post_cmd or after,
        )

    def config(self, place: Location, block: TaskBlock, older: tuple[str, ...]) -> tuple[EvaluatorConfig | None, Tree]:
        """nemo_evaluator_config of this task over the one for all."""
        values = Tree()
        adapter: Location = ("target", "api_endpoint", "adapter_config")
        if isinstance(self.tree.get(*adapter), dict):  # for all tasks, too
            values = self.tree.below(adapter).at(("target", "api_endpoint", "adapter_config"))
        for outer in (("evaluation",), place):
            names = [name for name in ("nemo_evaluator_config", "config") if self.tree.get(*outer, name) is not None]
            if len(names) == 2:
                where = self.tree.where((*outer, "config"))
                self.problems.append(Problem(where, "is the older name of nemo_evaluator_config; give one of them"))
            if names:
                values = self.tree.below((*outer, names[0])).over(values)
        for key, value in (block.overrides or {}).items():
            if key.startswith(older):
                values.put(tuple(key.split(".")), value, self.tree.origin((*place, "overrides", key)))
        values = in_newer_words(values, MOVED_IN_TASKS, self.notices)
        found = validate_block(EvaluatorConfig, values.data, (), values, self.problems)
        return cast("EvaluatorConfig | None", found), values

    def eval_file(self, block: TaskBlock, place: Location) -> Path | None:
        """The eval file of a task."""
        name = block.eval or block.name
        tried = list(_candidates(name, self.folder, self.cwd))
        for path in tried:
            if path.is_file():
                return path.resolve()
        for provider in self.providers:
            provided = provider(name)
            if provided is not None:
                return provided
        said = f"no eval file for the task {name!r}: looked for {', '.join(map(str, tried))}; `eval: PATH` names it"
        if not self.providers:
            said += "; and no package that provides tasks is installed"
        self.problems.append(Problem(self.tree.where(place), said))
        return None

    def target(self, block: TaskBlock, asked: ApiEndpoint, place: Location) -> list[Override]:
        """The model that is measured instead of the eval file's."""
        model = asked.model_id or self.endpoint.model
        found: list[Override] = []
        if model is not None:
            found.append((("target", "model"), model))
        url = asked.url or self.endpoint.base_url
        if url is not None:
            found.append((("target", "base_url"), api_root(url)))
        key = asked.api_key_name or self.endpoint.api_key_env
        if key is not None:
            found.append((("target", "api_key_env"), key))
        kind = block.endpoint_type or asked.type or self.endpoint.type
        if kind in ("chat", "vlm"):
            found.append((("target", "api"), "chat"))
        elif kind in ("completions", "completions_logprob"):
            found.append((("target", "api"), "completions"))
        elif kind not in (None, "undefined"):
            said = f"endpoint type {kind!r} is not supported; there are chat and completions"
            self.problems.append(Problem(self.tree.where((*place, "endpoint_type")), said))
        stream = asked.stream if asked.stream is not None else self.endpoint.stream
        if stream is not None:
            found.append((("target", "stream"), stream))
        if self.endpoint.version is not None:
            found.append((("target", "version"), self.endpoint.version))
        return found

    def params(self, params: Params, values: Tree) -> list[Override]:
        """Params as keys of the eval file."""
        here: Location = ("config", "params")
        limit = params.limit_samples
        if isinstance(limit, float) and not limit.is_integer():
            said = "a share of the samples is not supported; give their number"
            self.problems.append(Problem(values.where((*here, "limit_samples")), said))
            return []
        for name in ("task", "extra"):
            if getattr(params, name):
                said = "has no effect: the eval file defines what is asked and how it is graded"
                self.notices.append(f"{values.where((*here, name))}: {said}")
        given = ((path, getattr(params, name)) for name, path in PARAMS.items())
        return [
            (path, int(value) if path == PARAMS["limit_samples"] else value)
            for path, value in given
            if value is not None
        ]

    def document(self, path: Path) -> Document | None:
        """An eval file as it is written."""
        try:
            return read_document(path)
        except ConfigError as error:
            self.problems.extend(error.problems)
            return None

    def checked(
        self, document: Document, derived: list[Override], own: list[Override], place: Location
    ) -> tuple[Eval | None, list[Override]]:
        """The eval with all that laid over it, so that what is wrong is known before anything is submitted."""
        try:
            target = document.data.get("target")
            if isinstance(target, dict) and target.get("version") is not None:
                derived = [(key, value) for key, value in derived if key != ("target", "version")]
            if not _measures_model(document, derived, own):
                left = [".".join(key) for key, _ in derived if key[0] == "target"]
                derived = [(key, value) for key, value in derived if key[0] != "target"]
                if left:
                    said = f"its target is not a model, so these have no effect: {', '.join(left)}"
                    self.notices.append(f"{self.tree.where(place)}: {said}")
            overrides = [*derived, *own]
            spec = load_any(document, overrides)
            if spec.limits.trial_timeout < spec.limits.turn_timeout:
                longer = spec.limits.turn_timeout * (spec.limits.retries + 1)
                overrides.append((("limits", "trial_timeout"), longer))
                spec = load_any(document, overrides)
        except ConfigError as error:
            self.problems.extend(error.problems)
        except HoldfastError as error:
            self.problems.append(Problem(self.tree.where(place), str(error)))
        else:
            if spec.samples == []:
                self.problems.append(Problem(self.tree.where(place), f"no sample of {document.path} is selected"))
            self.notices.extend(spec.notices)
            if spec.document.data.get("baseline") is not None:
                said = "is not run here: add a task of the same eval, with its target under overrides"
                self.notices.append(f"{spec.document.where(('baseline',))}: {said}, and use `holdfast compare`")
            return spec, overrides
        return None, []


def _measures_model(document: Document, derived: Sequence[Override], own: Sequence[Override]) -> bool:
    """Whether an eval measures a model: by what is laid over it, else by its file. Without a target it takes any."""
    data = document.data
    said = [data.get("target"), *({key[1]: value} if key[1:] else value for key, value in own if key[0] == "target")]
    kinds = {kind for block in said if isinstance(block, dict) for kind in TARGETS if kind in block}
    if not kinds and (find_format(data) is not None or data.get("target") is None):
        return any(key == ("target", "model") for key, _ in derived)
    return kinds == {"model"}


def installed_providers() -> list[TaskProvider]:
    """The providers that installed packages register."""
    return [cast("TaskProvider", entry.load()) for entry in entry_points(group=ENTRY_POINTS)]


def _own(overrides: dict[str, Any] | None, older: tuple[str, ...]) -> Iterable[tuple[str, Any]]:
    """Overrides that are meant for the eval file, not the older dialect's for nemo_evaluator_config."""
    return [(key, value) for key, value in (overrides or {}).items() if not key.startswith(older)]


def _candidates(name: str, folder: Path, cwd: Path) -> Iterable[Path]:
    """Where an eval file of that name may lie."""
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return dict.fromkeys([cwd / path, folder / path])
    return dict.fromkeys([folder / "evals" / f"{name}.yaml", cwd / f"{name}.yaml", cwd / "evals" / f"{name}.yaml"])
