"""A checked eval, a place in one (`Origin`), and the fields of a row that its target and its graders can see.

A field that only graders read is in no output's key: a corrected label is graded again, and calls nobody. Templates and
expressions see only the fields that they name. Code that gets the whole row may read any field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.errors import ConfigError, Problem
from holdfast.spec.document import Document, Location, file_inside
from holdfast.spec.grader_schema import is_judge
from holdfast.spec.load_graders import templates_in
from holdfast.spec.schema import FILE_KINDS
from holdfast.spec.target_schema import ModelTarget
from holdfast.spec.template import PatternTemplate, Template, expression, template, texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from holdfast.spec.eval_schema import (
        DatasetBlock,
        GateBlock,
        HooksBlock,
        Limits,
        MessageBlock,
        Price,
        ResponderBlock,
        WorkspaceBlock,
    )
    from holdfast.spec.exports import ExportBlock, LiveExport
    from holdfast.spec.grader_schema import GraderBlock, PromptGrader
    from holdfast.spec.target_schema import TargetBlock


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
        agent = self.target.multi_call or any(getattr(self.target, name, False) for name in ("tools", "may_pause"))
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
