"""A checked eval, a place in one (`Origin`), what its target and its graders can see, and its benchmark's tasks.

A field of a row that only graders read is in no output's key: a corrected label is graded again, and calls nobody.
Templates and expressions see only the fields that they name. Code that gets the whole row may read any field.

Inputs of code that its fingerprint does not show are named by `files` and `env` in the eval file. Contents of files and
digests of variables are part of the keys that depend on them: of outputs, of a grader's verdicts, or of both. Values of
variables may be secrets, so only digests are stored.
"""

from __future__ import annotations

import glob
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from holdfast.canonical import digest
from holdfast.errors import ConfigError, Problem
from holdfast.spec.document import Document, Location, file_inside
from holdfast.spec.fingerprint import content_digest, note_files
from holdfast.spec.grader_schema import is_judge
from holdfast.spec.load_graders import templates_in
from holdfast.spec.schema import FILE_KINDS
from holdfast.spec.target_schema import ModelTarget
from holdfast.spec.template import PatternTemplate, Template, expression, template, texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.spec.eval_schema import (
        DatasetBlock,
        ExportBlock,
        GateBlock,
        HooksBlock,
        Limits,
        LiveExport,
        MessageBlock,
        Price,
        ResponderBlock,
        WorkspaceBlock,
    )
    from holdfast.spec.grader_schema import GraderBlock, PromptGrader
    from holdfast.spec.target_schema import TargetBlock


TARGET: Final = "target"
"""the target's name under `files` and `env`"""
TASK_FIELD: Final = "task"
"""the field of a benchmark's rows that names their task"""


class Checkpoint(msgspec.Struct, frozen=True):
    """Graders that run after a turn."""

    after_turn: int
    stops: bool
    """a failure ends the conversation"""
    graders: tuple[GraderBlock, ...]


class RowTemplate(NamedTuple):
    """A template over the row."""

    location: Location
    """in the eval file"""
    source: str
    variables: frozenset[str] = frozenset()
    """its variables other than the row's fields"""
    is_pattern: bool = False
    grader: Location | None = None
    """the location of its grader, if it belongs to one"""

    def compile(self, *, texts_only: bool = False) -> Template:
        """Compile the template; raises TemplateSyntaxError if it is invalid."""
        return PatternTemplate(self.source) if self.is_pattern else Template(self.source, texts_only=texts_only)


class Eval(msgspec.Struct, frozen=True):
    """An eval that passed every check that needs no data."""

    name: str
    folder: Path
    """the base of relative paths"""
    document: Document
    dataset: DatasetBlock | None
    samples: list[dict[str, Any]] | None
    target: TargetBlock
    system: str | None
    prompt: str | None
    """None if there are messages"""
    messages: tuple[MessageBlock, ...]
    """messages up to the first reply, instead of a prompt"""
    messages_from: str | None
    """an expression over the row that returns these messages"""
    history: str | None
    """an expression over the row that returns messages before the prompt"""
    continuations: str | None
    """an expression over the row that returns texts whose likelihood is asked for instead of a reply"""
    follow_ups: tuple[str, ...]
    follow_ups_from: str | None
    """an expression over the row that returns its follow-ups"""
    responder: ResponderBlock | None
    workspace: WorkspaceBlock | None
    checkpoints: tuple[Checkpoint, ...]
    """in the order of their turns"""
    trials: int
    graders: tuple[GraderBlock, ...]
    by: tuple[str, ...]
    """fields of the row that results are broken down by"""
    cluster: str | None
    """field of the row that groups samples, for intervals"""
    limits: Limits
    gate: GateBlock | None
    """None if there is nothing to check"""
    same_prompt: bool
    """all rows may have the same prompt"""
    hooks: HooksBlock | None
    """None if there is no program to run"""
    prices: dict[str, Price]
    live_exports: Mapping[str, LiveExport]
    """copies that are written while the run is in progress, by their keys under `output`"""
    exports: tuple[ExportBlock, ...]
    """destinations of the finished run"""
    functions: Mapping[str, Any]
    """callables passed from Python, by the references that stand for them"""
    files: list[str] | dict[str, list[str]] = []
    """files that code reads: for all code, or by `target` and names of graders"""
    env: list[str] | dict[str, list[str]] = []
    """environment variables that code reads"""
    notices: tuple[str, ...] = ()
    """warnings about a valid file"""

    def templates(self) -> Iterator[RowTemplate]:
        """Yield every template over the row: of the conversation, the target and the graders."""
        if self.system is not None:
            yield RowTemplate(("system",), self.system)
        if self.prompt is not None:
            yield RowTemplate(("prompt",), self.prompt)
        for place, message in enumerate(self.messages):
            for location, text in message.templated():
                yield RowTemplate(("messages", place, *location), text)
        for number, text in enumerate(self.follow_ups):
            yield RowTemplate(("follow_ups", number), text)
        if self.responder is not None and self.responder.instructions:
            yield RowTemplate(("responder", "instructions"), self.responder.instructions)
        for name in self.target.templates:
            for text in texts(getattr(self.target, name)):
                yield RowTemplate(("target", name), text, frozenset({"prompt", "messages", "trial"}))
        for base, grader in self._written_graders():
            variables = frozenset({"output", "messages"} if is_judge(grader) else ())
            for each in templates_in(grader):
                yield RowTemplate((*base, *each.location), each.source, variables, each.is_pattern, base)

    def expressions(self) -> Iterator[tuple[Location, str]]:
        """Yield every expression over the row, with its location."""
        yield from self.row_expressions()
        if self.follow_ups_from is not None:
            yield ("follow_ups",), self.follow_ups_from
        if self.responder is not None and self.responder.stop_when is not None:
            yield ("responder", "stop_when"), self.responder.stop_when
        if self.responder is not None and isinstance(self.responder.max_followups, str):
            yield ("responder", "max_followups"), self.responder.max_followups
        if self.workspace is not None and self.workspace.files is not None:
            yield ("workspace", "files"), self.workspace.files
        for name in self.target.expressions:
            if (formula := getattr(self.target, name)) is not None:
                yield ("target", name), formula
        for location, grader in self._written_graders():
            if grader.where is not None:
                yield (*location, "where"), grader.where

    def row_expressions(self) -> Iterator[tuple[Location, str]]:
        """Yield the expressions that must have a value for every row, with their locations."""
        if self.history is not None:
            yield ("history",), self.history
        if self.messages_from is not None:
            yield ("messages",), self.messages_from
        if self.continuations is not None:
            yield ("continuations",), self.continuations
        if isinstance(self.target, ModelTarget) and self.target.params_from is not None:
            yield ("target", "params_from"), self.target.params_from
        for location, grader in self.placed_graders():
            for name in grader.expressions:
                if (formula := getattr(grader, name)) is not None:
                    yield (*location, name), formula

    def models(self) -> list[str]:
        """Return the models of the target, the judges and the simulated user."""
        blocks: list[ModelTarget | PromptGrader | ResponderBlock | None] = [
            self.target if isinstance(self.target, ModelTarget) else None,
            *(grader for _, grader in self.placed_graders() if is_judge(grader)),
            self.responder,
        ]
        names = (block.model for block in blocks if block is not None)
        return list(dict.fromkeys(name for name in names if isinstance(name, str)))

    def placed_graders(self) -> Iterator[tuple[Location, GraderBlock]]:
        """Yield every grader with its location, checkpoints first, and every vote of several judges."""
        for location, grader in self._written_graders():
            for block in grader.expanded():
                yield location, block

    def _written_graders(self) -> Iterator[tuple[Location, GraderBlock]]:
        for place, checkpoint in enumerate(self.checkpoints):
            for number, grader in enumerate(checkpoint.graders):
                yield ("checkpoints", place, "graders", number), grader
        for number, grader in enumerate(self.graders):
            yield ("graders", number), grader

    @property
    def multi_turn(self) -> bool:
        """True if a trial may have several turns, so that each reply is recorded."""
        return bool(self.follow_ups or self.follow_ups_from or self.responder or self.checkpoints)

    @property
    def multi_call(self) -> bool:
        """True if a trial may make several recorded calls: it has turns, tools or a workspace, or is an agent."""
        agent = any(getattr(self.target, name, False) for name in ("multi_call", "tools", "may_pause", "proxied"))
        return self.multi_turn or agent or self.workspace is not None


class Origin(NamedTuple):
    """An eval, and the location of one of its blocks."""

    spec: Eval
    location: Location

    @property
    def folder(self) -> Path:
        """The base of relative paths in the eval file."""
        return self.spec.folder

    def where(self, *keys: str | int) -> str:
        """Return `file:line: key` of the block, or of a key in the block, for messages."""
        return self.spec.document.where((*self.location, *keys))

    def read(self, name: str) -> bytes:
        """Read a file in the eval's folder; raises ConfigError if that fails."""
        return file_inside(self.folder, name, self.where())

    def read_schema(self, name: str) -> dict[str, Any]:
        """Read a JSON Schema from a file in the eval's folder; raises ConfigError if there is no schema in it."""
        try:
            schema = msgspec.json.decode(self.read(name))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self.error(f"{name} is not a JSON Schema: {error}") from error
        if not isinstance(schema, dict):
            raise self.error(f"{name} is not a JSON Schema: it is not an object")
        return schema

    def error(self, message: str, hint: str | None = None) -> ConfigError:
        """Make an error that names the block's place in the eval file."""
        return ConfigError([Problem(self.where(), message)], remedy=hint)


def fields_of_target(spec: Eval) -> frozenset[str] | None:
    """Return the fields of a row that can change an output; None if the target may see every field.

    If messages have files, the fields of messages are left out: contents are digested as they are sent.
    """
    if spec.target.sees_row or code_sees_row(spec):
        return None
    with_files = spec.messages_from is not None or any(
        location[-1] in FILE_KINDS for block in spec.messages for location, _ in block.templated()
    )
    names: set[str] = set()
    for each in spec.templates():
        if each.grader is None and not (with_files and each.location[0] == "messages"):
            compiled = each.compile()
            if compiled.takes_row:
                return None
            names |= compiled.names - each.variables
    for location, formula in spec.expressions():
        if location[0] not in ("graders", "checkpoints") and location != ("messages",):
            asked = expression(formula)
            if asked.takes_row:
                return None
            names |= asked.names
    return frozenset(names)


def code_sees_row(spec: Eval) -> bool:
    """Return True if other user code gets the row: tools, the simulated user, hooks before a trial."""
    tools = [tool.python for tool in getattr(spec.target, "tools", ())]
    user = None if spec.responder is None else spec.responder.python
    return any(tools) or user is not None or (spec.hooks is not None and bool(spec.hooks.before_task))


def fields_of_grader(block: GraderBlock) -> frozenset[str] | None:
    """Return the fields of a row that can change a grader's verdict; None if it may see every field."""
    if block.sees_row:
        return None
    compiled = [template(source) for _, source, _ in templates_in(block)]
    return None if any(each.takes_row for each in compiled) else frozenset().union(*(each.names for each in compiled))


def named_inputs(spec: Eval, part: str, *, runs_code: bool) -> dict[str, dict[str, str | None]]:
    """Return what `files` and `env` add to the identity of a part: the target or a grader."""
    files: dict[str, str | None] = {
        name: content
        for location, pattern in _names(spec, "files", part, runs_code=runs_code)
        if not pattern.startswith("!")
        for name, content in _contents(spec, location, pattern)
    }
    values: dict[str, str | None] = {
        name: digest([name, value])
        for _, name in _names(spec, "env", part, runs_code=runs_code)
        if (value := os.environ.get(name)) is not None
    }
    return {key: value for key, value in (("files", files), ("environment", values)) if value}


def with_named_inputs(identity: dict[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part's identity with its named inputs."""
    merged = {key: {**identity.get(key, {}), **value} for key, value in named.items()}
    return {**identity, **merged}


def excluded_patterns(spec: Eval) -> list[str]:
    """Return the patterns of files that code reads but that are not inputs."""
    return [pattern[1:] for pattern in _patterns(spec) if pattern.startswith("!")]


def is_named(spec: Eval, path: str) -> bool:
    """Return True if the eval file lists a file, as an input or as an exception."""
    return any(fnmatchcase(path, os.path.normpath(pattern.removeprefix("!"))) for pattern in _patterns(spec))


def _patterns(spec: Eval) -> list[str]:
    lists = spec.files.values() if isinstance(spec.files, dict) else [spec.files]
    return [pattern for patterns in lists for pattern in patterns]


def _names(spec: Eval, key: str, part: str, *, runs_code: bool) -> Iterator[tuple[Location, str]]:
    named: list[str] | Mapping[str, list[str]] = getattr(spec, key)
    if isinstance(named, dict):
        yield from (((key, part, number), name) for number, name in enumerate(named.get(part, ())))
    elif runs_code:
        yield from (((key, number), name) for number, name in enumerate(named))


def _contents(spec: Eval, location: Location, pattern: str) -> Iterator[tuple[str, str]]:
    where = spec.document.where(location)
    matches = [Path(match) for match in sorted(glob.glob(pattern, root_dir=spec.folder, recursive=True))]
    files = [match for match in matches if (spec.folder / match).is_file()]
    if not files and matches:
        remedy = f"Write {pattern.rstrip('/')}/** for all its files."
        raise ConfigError([Problem(where, f"{pattern}: is a folder, not a file")], remedy=remedy)
    if not files:
        remedy = f"Paths are relative to the eval file's folder, {spec.folder}."
        raise ConfigError([Problem(where, f"{pattern}: no such file")], remedy=remedy)
    for file in files:
        path = spec.folder / file
        content = content_digest(path)
        if content is None:
            raise ConfigError([Problem(where, f"{path}: cannot be read")])
        note_files([path])  # its content is in the key, so reading it is no further input
        yield os.path.normpath(file), content


class TaskMetric(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of a task, and the grader whose scores it is made of."""

    metric: str
    grader: str | None = None
    """None: no grader gives the metric"""
    filter: str = "none"
    aggregation: str = "mean"
    higher_is_better: bool | None = True
    k: int | None = None
    """set for pass@k: the chance that at least one of k trials passes"""

    @property
    def key(self) -> str:
        """The metric's name among results."""
        return f"{self.metric},{self.filter}"

    @property
    def stderr_key(self) -> str:
        """The name of the metric's standard error."""
        return f"{self.metric}_stderr,{self.filter}"


class BenchmarkTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task: rows with one prompt format and one set of metrics."""

    metrics: list[TaskMetric]
    version: Any = None
    n_shot: int = 0
    n_original: int | None = None
    """rows of the whole task, of which a run may use fewer"""
    alias: str | None = None
    """name in tables"""


class GroupMetric(msgspec.Struct, frozen=True, kw_only=True):
    """A metric that a group averages over its tasks."""

    metric: str
    filter: str | None = None
    """None: every filter that the tasks have"""
    weight_by_size: bool = True


class BenchmarkGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of tasks and of other groups."""

    tasks: list[str]
    metrics: list[GroupMetric] = []
    alias: str | None = None
    version: Any = None


class BenchmarkTasks(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks and groups of a benchmark."""

    tasks: dict[str, BenchmarkTask]
    groups: dict[str, BenchmarkGroup] = {}
    name: str | None = None
    provider: str | None = None
    provider_version: str | None = None
    seed: int | None = None
    primary: str | None = None
    """the metric that is the benchmark's score"""

    def leaves(self, group: str) -> Iterator[str]:
        """Yield the tasks of a group and of the groups in it."""
        for member in self.groups[group].tasks:
            if member in self.groups:
                yield from self.leaves(member)
            else:
                yield member


def benchmark_tasks(eval_data: Mapping[str, Any]) -> BenchmarkTasks | None:
    """Return the tasks under `metadata.benchmark`, in lm-eval's words; None if there are none."""
    metadata = eval_data.get("metadata")
    block = metadata.get("benchmark") if isinstance(metadata, dict) else None
    try:
        tasks = msgspec.convert(block, BenchmarkTasks)
    except msgspec.ValidationError:
        return None
    trials = eval_data.get("trials", 1)
    if not isinstance(trials, int) or trials < 2:
        return tasks
    listed = {name: replace(task, metrics=[*_up_to(trials, task.metrics)]) for name, task in tasks.tasks.items()}
    return replace(tasks, tasks=listed)


def _up_to(trials: int, metrics: list[TaskMetric]) -> Iterator[TaskMetric]:
    """Yield metrics, and after pass@1 also pass@k for each k up to the number of trials."""
    for metric in metrics:
        yield metric
        if metric.k == 1:
            for k in range(2, trials + 1):
                yield replace(metric, metric=metric.metric.replace("1", str(k)), k=k)
