"""Loads an eval file into an `Eval`, or reports everything that is wrong with it."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from holdfast.errors import ConfigError, Problem, UsageError
from holdfast.spec.document import Document, Location, read_document
from holdfast.spec.grader_schema import is_judge
from holdfast.spec.legacy import check_spellings, eval_version
from holdfast.spec.load_exports import read_export, read_live_exports
from holdfast.spec.load_graders import read_graders, templates_in, with_player
from holdfast.spec.load_likelihood import likelihood_problems
from holdfast.spec.load_targets import read_target, target_kind
from holdfast.spec.named_inputs import misnamed_parts
from holdfast.spec.overrides import apply_override
from holdfast.spec.schema import EvalFields
from holdfast.spec.selection import Selection
from holdfast.spec.target_schema import ModelTarget
from holdfast.spec.template import PatternTemplate, Template, TemplateSyntaxError, expression, texts
from holdfast.spec.trial_limits import limit_problems, with_defaults
from holdfast.spec.vacuous import vacuous_checks
from holdfast.spec.validation import suggest, validate_block

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence, Set

    from holdfast.spec.agent_schema import WorkspaceBlock
    from holdfast.spec.conversation_schema import MessageBlock, ResponderBlock
    from holdfast.spec.export_schema import ExportBlock, LiveExport
    from holdfast.spec.gate_schema import GateBlock
    from holdfast.spec.grader_schema import GraderBlock, PromptGrader
    from holdfast.spec.hook_schema import HooksBlock
    from holdfast.spec.model_schema import Price
    from holdfast.spec.schema import DatasetBlock, Limits
    from holdfast.spec.target_schema import TargetBlock


class Checkpoint(msgspec.Struct, frozen=True):
    """Graders after a turn."""

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
    """its variables beside the row's fields"""
    is_pattern: bool = False
    grader: Location | None = None
    """the location of the grader that it belongs to, if any"""

    def compile(self, *, texts_only: bool = False) -> Template:
        """Return the template; raises TemplateSyntaxError where it cannot be read."""
        return PatternTemplate(self.source) if self.is_pattern else Template(self.source, texts_only=texts_only)


class Eval(msgspec.Struct, frozen=True):
    """An eval, checked as far as possible without its data."""

    name: str
    folder: Path
    """the base of relative paths"""
    document: Document
    dataset: DatasetBlock | None
    samples: list[dict[str, Any]] | None
    target: TargetBlock
    system: str | None
    prompt: str | None
    """None where there are messages"""
    messages: tuple[MessageBlock, ...]
    """messages up to the first reply, instead of a prompt"""
    messages_from: str | None
    """an expression over the row, where rows bring these messages"""
    history: str | None
    """an expression over the row, for messages before the prompt"""
    continuations: str | None
    """an expression over the row, for texts whose likelihood is asked for instead of a reply"""
    follow_ups: tuple[str, ...]
    follow_ups_from: str | None
    """an expression over the row, where rows bring their own follow-ups"""
    responder: ResponderBlock | None
    workspace: WorkspaceBlock | None
    checkpoints: tuple[Checkpoint, ...]
    """in the order of their turns"""
    trials: int
    graders: tuple[GraderBlock, ...]
    by: tuple[str, ...]
    """fields of the row by which results are broken down"""
    cluster: str | None
    """field of the row by which samples belong together, for intervals"""
    limits: Limits
    gate: GateBlock | None
    """None where there is nothing to check"""
    same_prompt: bool
    """all rows may ask the same"""
    hooks: HooksBlock | None
    """None where there is no program to run"""
    prices: dict[str, Price]
    live_exports: Mapping[str, LiveExport]
    """copies that are written while the run is in progress, by their keys under `output`"""
    exports: tuple[ExportBlock, ...]
    """where a finished run goes"""
    functions: Mapping[str, Any]
    """callables given from Python, by the reference that stands for them"""
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
        """Yield every grader with its location, those of checkpoints first, and the votes of several judges."""
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
        """True where a trial may have several turns, so that each reply is recorded."""
        return bool(self.follow_ups or self.follow_ups_from or self.responder or self.checkpoints)

    @property
    def multi_call(self) -> bool:
        """True where a trial may make several recorded calls: it has turns, tools or a workspace, or is an agent."""
        agent = self.target.multi_call or any(getattr(self.target, name, False) for name in ("tools", "may_pause"))
        return self.multi_turn or agent or self.workspace is not None


def load_eval(path: Path, overrides: Sequence[tuple[tuple[str, ...], Any]] = ()) -> Eval:
    """Read and check an eval file, with overrides from the command line."""
    return apply_overrides(with_deprecation_notices(read_document(path)), overrides, path.resolve().parent)


def with_deprecation_notices(document: Document) -> Document:
    """Attach deprecation notices; raise ConfigError for spellings that were removed."""
    return replace(document, notices=check_spellings(document))


def apply_overrides(document: Document, overrides: Sequence[tuple[tuple[str, ...], Any]], folder: Path) -> Eval:
    """Build the eval of a document, with overrides from the command line."""
    data = copy.deepcopy(document.data)
    for key, value in overrides:
        if key in _SELECTIONS and isinstance(data.get("samples"), list) and "dataset" not in data:
            data["samples"] = _select(data["samples"], key[1], value)
        else:
            apply_override(data, key, value)
    return build_eval(replace(document, data=data), folder, notices=document.notices)


_SELECTIONS: Final = (("dataset", "limit"), ("dataset", "ids"), ("dataset", "tags"))


def _select(samples: list[Any], key: str, value: Any) -> list[Any]:
    """Return the rows in the file that the command line selects."""
    if key == "limit":
        return samples[: limit_of(value)]
    selection = Selection.of(**{key: value})
    return [row for row in samples if not isinstance(row, dict) or selection.takes(row, row.get("id"))]


def limit_of(value: Any) -> int:
    """Check a number of rows from the command line."""
    if type(value) is not int or value < 1:
        raise UsageError(f"dataset.limit must be a number from 1, not {value!r}")
    return value


def baseline_of(spec: Eval) -> Eval | None:
    """Return the eval of the target under `baseline:`, which inherits keys from the first target if it is of its kind.

    Both have the same judge. Exports for other tools go into a folder of their own.
    """
    data = spec.document.data
    if not isinstance(data.get("baseline"), dict):
        return None
    same = target_kind(data["target"]) == target_kind(data["baseline"])
    target = {**data["target"], **data["baseline"]} if same else data["baseline"]
    problems: list[Problem] = []
    read_target(target, spec.document, problems, "baseline")
    if problems:
        raise ConfigError(problems)
    changed = copy.deepcopy({**data, "target": target})
    del changed["baseline"]
    changed.pop("gate", None)  # which is about the target that is compared with it
    for raw, grader in zip(changed.get("graders") or [], spec.graders, strict=True):
        inherited = {key: getattr(grader, key) for key in grader.inherited}
        raw.update({key: value for key, value in inherited.items() if value is not None})
    _export_below(changed, spec, "baseline")
    built = build_eval(replace(spec.document, data=changed), spec.folder, spec.functions)
    return msgspec.structs.replace(built, notices=())  # the first eval has them already


def with_export_folder(spec: Eval, name: str) -> Eval:
    """Return the eval with exports for other tools in a folder of their own, for one of several targets."""
    changed = copy.deepcopy(spec.document.data)
    if not _export_below(changed, spec, name):
        return spec
    built = build_eval(replace(spec.document, data=changed), spec.folder, spec.functions)
    return msgspec.structs.replace(built, notices=spec.notices)


def _export_below(data: dict[str, Any], spec: Eval, name: str) -> bool:
    """Put a folder below those of all exports of an eval, in place; return False if there are none."""
    output = data.get("output") or {}
    blocks = [*(output[export] for export in spec.live_exports), *(output.get("export") or [])]
    folders = [block for block in blocks if isinstance(block, dict) and block.get("dir")]
    for block in folders:
        block["dir"] = f"{block['dir']}/{name}"
    return bool(folders)


def eval_of_run(
    data: dict[str, Any],
    folder: str,
    eval_file: str | None,
    overrides: Sequence[tuple[tuple[str, ...], Any]] = (),
) -> Eval:
    """Return the eval in a run's manifest."""
    document = Document(copy.deepcopy(data), Path(eval_file) if eval_file else None)
    limits = document.data.get("limits")
    if isinstance(limits, dict) and "max_tokens" in limits:  # what runs made by earlier versions call the budget
        limits.setdefault("token_budget", limits.pop("max_tokens"))
    for key, value in overrides:
        apply_override(document.data, key, value)
    return build_eval(document, Path(folder))


def build_eval(
    document: Document,
    folder: Path,
    functions: Mapping[str, Any] | None = None,
    notices: Sequence[str] = (),
) -> Eval:
    """Check a document as a whole; raise ConfigError with all problems."""
    newer = eval_version(document)
    try:
        return _build(document, folder, functions or {}, (*notices, *([newer] if newer else [])))
    except ConfigError as error:
        error.remedy = newer or error.remedy  # an unknown key may be new
        raise


def _build(document: Document, folder: Path, functions: Mapping[str, Any], notices: tuple[str, ...]) -> Eval:
    problems = [
        Problem(document.where(location), "NaN and infinity are not valid JSON numbers")
        for location in _not_finite(document.data)
        if location[:1] != ("samples",)  # the dataset reports those in rows
    ]
    top = cast("EvalFields | None", validate_block(EvalFields, document.data, (), document, problems))
    target = read_target(document.data.get("target"), document, problems)
    graders = read_graders(document.data.get("graders") or [], ("graders",), document, folder, problems)
    checkpoints = _checkpoints(top, document, folder, problems)
    exports = _exports(top, document, problems)
    live_exports = {} if top is None else read_live_exports(top.output, document, problems)
    both = document.data.get("dataset") is not None
    if both == (document.data.get("samples") is not None):
        where = document.where(("samples",) if both else ())
        problems.append(Problem(where, "give either `dataset` or `samples`" + (", not both" if both else "")))
    if top is None:
        raise ConfigError(problems)
    problems.extend(_message_problems(top, document))
    names = {block.name for grader in graders for block in grader.expanded()}
    names |= {
        f"checkpoint@{place.after_turn}/{block.name}"
        for place in checkpoints
        for grader in place.graders
        for block in grader.expanded()
    }
    if top.gate is not None:
        problems.extend(_gate_problems(top.gate, names, top.trials, document))
    if problems:
        raise ConfigError(problems)
    assert target is not None
    built = Eval(
        name=top.name,
        folder=folder,
        document=document,
        dataset=top.dataset,
        samples=top.samples,
        target=target,
        system=top.system,
        prompt=top.prompt,
        messages=tuple(top.messages) if isinstance(top.messages, list) else (),
        messages_from=top.messages if isinstance(top.messages, str) else None,
        history=top.history,
        continuations=top.continuations,
        follow_ups=tuple(top.follow_ups) if isinstance(top.follow_ups, list) else (),
        follow_ups_from=top.follow_ups.strip().removeprefix("{{").removesuffix("}}").strip()
        if isinstance(top.follow_ups, str)
        else None,
        responder=with_player(top.responder, document, problems),
        workspace=top.workspace,
        checkpoints=checkpoints,
        trials=top.trials,
        graders=tuple(graders),
        by=tuple(top.by),
        cluster=top.cluster,
        limits=top.limits,
        gate=top.gate if top.gate is not None and top.gate.present else None,
        same_prompt=top.same_prompt,
        hooks=top.hooks if top.hooks is not None and top.hooks.present else None,
        prices=top.prices,
        live_exports=live_exports,
        exports=exports,
        functions=functions,
        files=top.files,
        env=top.env,
        notices=notices,
    )
    graders_named = {block.name for _, block in built.placed_graders()}
    for key in ("files", "env"):
        problems.extend(misnamed_parts(key, getattr(built, key), graders_named, document))
    problems.extend(
        Problem(
            document.where(place), f"{grader.type} looks at files, and the eval has no workspace: add `workspace: {{}}`"
        )
        for place, grader in built.placed_graders()
        if grader.needs_workspace and built.workspace is None
    )
    for place, message in (*likelihood_problems(built), *limit_problems(built)):
        problems.append(Problem(document.where(place), message))
    for each in built.templates():
        try:
            each.compile()
        except TemplateSyntaxError as error:
            problems.append(Problem(document.where(each.location), f"not a valid template: {error.message}"))
    for place, formula in built.expressions():
        try:
            expression(formula)
        except TemplateSyntaxError as error:
            problems.append(Problem(document.where(place), f"not a valid expression: {error.message}"))
    if problems:
        raise ConfigError(problems)
    limits = with_defaults(built.limits, built)
    more = [*vacuous_checks(built), *([] if top.gate is None else top.gate.idle_settings())]
    return msgspec.structs.replace(built, limits=limits, notices=(*notices, *more))


def _message_problems(top: EvalFields, document: Document) -> Iterator[Problem]:
    """Yield what does not go together with `messages`, or is missing without them."""
    if top.messages is None:
        if top.prompt is None:
            yield Problem(document.where(("prompt",)), "is missing; give either `prompt` or `messages`")
        return
    others = {"prompt": top.prompt, "history": top.history, "continuations": top.continuations}
    for key, value in others.items():
        if value is not None:
            yield Problem(document.where((key,)), f"`messages` are the whole conversation so far: leave out `{key}`")
    if isinstance(top.messages, list) and top.messages[-1].role != "user":
        where = document.where(("messages", len(top.messages) - 1, "role"))
        yield Problem(where, "the last message is the user's, which the target answers")


def _not_finite(node: Any, location: Location = ()) -> Iterator[Location]:
    """Yield the locations of NaN and infinity, which YAML writes as .nan and .inf."""
    if isinstance(node, float) and not math.isfinite(node):
        yield location
    elif isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _not_finite(value, (*location, key))


_GATED: Final = ("score", "low", "high", "corpus")
"""numbers of a grader that can be gated as `GRADER/NUMBER`, beside `pass@k` and `pass^k`"""


def _gate_problems(gate: GateBlock, graders: Set[str], trials: int, document: Document) -> Iterator[Problem]:
    """Yield what is wrong with the names under `gate`; `holdfast gate --min` takes the same names of metrics."""
    from holdfast.spec.gate_schema import RUN_METRICS, SETTINGS

    for name in graders & gate.model_fields_set & set(SETTINGS):
        message = "is a setting of the gate, and the name of a grader: give the grader another name"
        yield Problem(document.where(("gate", name)), message)
    for name in gate.minima:
        if (problem := _gate_problem(name, graders, frozenset(RUN_METRICS), trials)) is not None:
            yield Problem(document.where(("gate", name)), problem)


def _gate_problem(name: str, graders: Set[str], whole: Set[str], trials: int) -> str | None:
    """Describe what is wrong with the name of a metric."""
    if name in graders | whole:
        return None
    grader, _, number = name.rpartition("/")
    if grader not in graders:
        return f"no grader of this name{suggest(name, graders | whole)}"
    every_k = range(1, trials + 1)
    if number in _GATED or number in {f"pass@{k}" for k in every_k} | {f"pass^{k}" for k in every_k[1:]}:
        return None
    passes = "pass@1" if trials == 1 else f"pass@1 to pass@{trials}, pass^2 to pass^{trials}"
    return f"{grader!r} has no number {number!r}; it has {', '.join(_GATED)} and {passes}"


def _checkpoints(
    top: EvalFields | None, document: Document, folder: Path, problems: list[Problem]
) -> tuple[Checkpoint, ...]:
    """Read checkpoints, sorted by turn; refuses those that cannot be reached, and two after one turn."""
    if top is None:
        return ()
    of_the_row = top.responder is not None and isinstance(top.responder.max_followups, str)
    if top.responder is not None and top.follow_ups and not (of_the_row and isinstance(top.follow_ups, str)):
        problems.append(Problem(document.where(("responder",)), "give either follow_ups or a responder, not both"))
    last = None
    if isinstance(top.follow_ups, list):
        most = len(top.follow_ups) if top.responder is None else top.responder.max_followups
        last = None if isinstance(most, str) else 1 + most
    checkpoints: list[Checkpoint] = []
    everywhere: set[int] = set()
    named: set[tuple[int, str]] = set()
    for number, block in enumerate(top.checkpoints):
        where = document.where(("checkpoints", number, "after_turn"))
        if block.where is None and block.after_turn in everywhere:
            problems.append(
                Problem(where, f"duplicate checkpoint after turn {block.after_turn}; list all its graders in one")
            )
        if last is not None and block.after_turn > last:
            problems.append(
                Problem(where, f"{block.after_turn} is never reached: the conversation has at most {last} turns")
            )
        if block.where is None:
            everywhere.add(block.after_turn)
        graders = read_graders(block.graders, ("checkpoints", number, "graders"), document, folder, problems)
        for grader in graders:
            if (block.after_turn, grader.name) in named:
                message = f"duplicate grader name {grader.name!r} after turn {block.after_turn}"
                problems.append(Problem(document.where(("checkpoints", number)), message))
        named |= {(block.after_turn, grader.name) for grader in graders}
        if block.where is not None:
            graders = [grader.model_copy(update={"where": _both(block.where, grader.where)}) for grader in graders]
        checkpoints.append(Checkpoint(block.after_turn, block.on_failure == "stop", tuple(graders)))
    return tuple(sorted(checkpoints, key=lambda checkpoint: checkpoint.after_turn))


def _exports(top: EvalFields | None, document: Document, problems: list[Problem]) -> tuple[ExportBlock, ...]:
    exports: dict[str, ExportBlock] = {}
    for number, raw in enumerate(top.output.export if top is not None else []):
        location = ("output", "export", number)
        block = read_export({"to": raw} if isinstance(raw, str) else raw, location, document, problems)
        if block is not None and block.to in exports:
            problems.append(Problem(document.where(location), f"duplicate export to {block.to}"))
        elif block is not None:
            exports[block.to] = block
    return tuple(exports.values())


def _both(one: str, other: str | None) -> str:
    return one if other is None else f"({one}) and ({other})"


def target_name(target: TargetBlock) -> str:
    """Return the target's name in tables and directory names."""
    return target.label
