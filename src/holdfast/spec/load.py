"""Loads an eval file into an `Eval`, or reports everything that is wrong with it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from holdfast.errors import ConfigError, Problem, UsageError, VersionError
from holdfast.spec.checks import conversation_problems, data_problems, eval_problems, gate_problems, vacuous_checks
from holdfast.spec.document import Document, Location, read_document
from holdfast.spec.eval import Checkpoint, Eval
from holdfast.spec.eval_schema import EvalFields, Selection
from holdfast.spec.exports import read_exports, read_live_exports
from holdfast.spec.load_graders import read_graders, with_player
from holdfast.spec.overrides import apply_override
from holdfast.spec.schema import SCHEMA_VERSION
from holdfast.spec.target_schema import read_target, target_kind
from holdfast.spec.trial_limits import with_defaults
from holdfast.spec.validation import validate_block
from holdfast.versions import check_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.spec.eval_schema import (
        ResponderBlock,
    )
    from holdfast.spec.exports import ExportBlock, LiveExport
    from holdfast.spec.grader_schema import GraderBlock
    from holdfast.spec.overrides import Override
    from holdfast.spec.target_schema import TargetBlock


def load_eval(path: Path, overrides: Sequence[Override] = ()) -> Eval:
    """Read and check an eval file, with overrides from the command line."""
    return apply_overrides(read_document(path), overrides, path.resolve().parent)


def apply_overrides(document: Document, overrides: Sequence[Override], folder: Path) -> Eval:
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
    """Return the eval of the target under `baseline`, which inherits keys from `target` if both are of one kind.

    Both evals have the same judge. The baseline's exports for other tools go into a folder of their own.
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
    changed.pop("gate", None)  # the gate is about the first target
    for raw, grader in zip(changed.get("graders") or [], spec.graders, strict=True):
        inherited = {key: getattr(grader, key) for key in grader.inherited}
        raw.update({key: value for key, value in inherited.items() if value is not None})
    _export_below(changed, spec, "baseline")
    built = build_eval(replace(spec.document, data=changed), spec.folder, spec.functions)
    return msgspec.structs.replace(built, notices=())  # the first eval has shown them


def with_export_folder(spec: Eval, name: str) -> Eval:
    """Return the eval of one of several targets, with its exports for other tools in a folder of their own."""
    changed = copy.deepcopy(spec.document.data)
    if not _export_below(changed, spec, name):
        return spec
    built = build_eval(replace(spec.document, data=changed), spec.folder, spec.functions)
    return msgspec.structs.replace(built, notices=spec.notices)


def _export_below(data: dict[str, Any], spec: Eval, name: str) -> bool:
    """Append a folder to the folder of each export, in place; return False if no export has a folder."""
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
    overrides: Sequence[Override] = (),
) -> Eval:
    """Return the eval that a run's manifest holds."""
    document = Document(copy.deepcopy(data), Path(eval_file) if eval_file else None)
    for key, value in overrides:
        apply_override(document.data, key, value)
    return build_eval(document, Path(folder))


def eval_version(document: Document) -> str | None:
    """Return a notice if a file's version is newer than ours; raise ConfigError if the version is not supported.

    A file without a version has the current one, which is written into the data.
    """
    written = document.data.get("schemaVersion", SCHEMA_VERSION)
    written = "null" if written is None else written
    try:
        newer = check_version(document.where(("schemaVersion",)), written, SCHEMA_VERSION)
    except VersionError as error:
        raise ConfigError([Problem("", error.message)], remedy=error.remedy) from error
    document.data["schemaVersion"] = str(written)
    return newer


def build_eval(
    document: Document,
    folder: Path,
    functions: Mapping[str, Any] | None = None,
    notices: Sequence[str] = (),
) -> Eval:
    """Check a document as a whole; raise ConfigError with all problems."""
    newer = eval_version(document)
    try:
        blocks = _read_blocks(document, folder)
        spec = _assemble(blocks, document, folder, functions or {})
        _refuse(document, eval_problems(spec))
    except ConfigError as error:
        error.remedy = newer or error.remedy  # an unknown key may be new
        raise
    gate = blocks.top.gate
    messages = [*notices, *([newer] if newer else []), *vacuous_checks(spec), *(gate.idle_settings() if gate else [])]
    return msgspec.structs.replace(spec, limits=with_defaults(spec.limits, spec), notices=tuple(messages))


class _Blocks(NamedTuple):
    """The blocks of an eval file, each read by its schema."""

    top: EvalFields
    target: TargetBlock
    graders: list[GraderBlock]
    checkpoints: list[Checkpoint]
    responder: ResponderBlock | None
    exports: tuple[ExportBlock, ...]
    live_exports: Mapping[str, LiveExport]


def _read_blocks(document: Document, folder: Path) -> _Blocks:
    """Read every block by its schema; raise ConfigError with all problems."""
    data = document.data
    problems = _placed(document, data_problems(data))
    top = cast("EvalFields | None", validate_block(EvalFields, data, (), document, problems))
    target = read_target(data.get("target"), document, problems)
    graders = read_graders(data.get("graders") or [], ("graders",), document, folder, problems)
    if top is None:
        raise ConfigError(problems)
    checkpoints = list(_read_checkpoints(top, document, folder, problems))
    exports = read_exports(top.output, document, problems)
    live_exports = read_live_exports(top.output, document, problems)
    responder = with_player(top.responder, document, problems)
    problems += _placed(document, conversation_problems(top))
    if top.gate is not None:
        names = {block.name for grader in graders for block in grader.expanded()}
        for checkpoint in checkpoints:
            turn = f"checkpoint@{checkpoint.after_turn}"
            names |= {f"{turn}/{block.name}" for grader in checkpoint.graders for block in grader.expanded()}
        problems += _placed(document, gate_problems(top.gate, names, top.trials))
    if problems or target is None:
        raise ConfigError(problems)
    return _Blocks(top, target, graders, checkpoints, responder, exports, live_exports)


def _placed(document: Document, findings: Iterable[tuple[Location, str]]) -> list[Problem]:
    """Return problems with their places in the file."""
    return [Problem(document.where(location), message) for location, message in findings]


def _refuse(document: Document, findings: Iterable[tuple[Location, str]]) -> None:
    """Raise ConfigError if there are problems."""
    if problems := _placed(document, findings):
        raise ConfigError(problems)


def _read_checkpoints(top: EvalFields, document: Document, folder: Path, problems: list[Problem]) -> list[Checkpoint]:
    """Read checkpoints, sorted by turn; refuses unreachable ones, and two after one turn."""
    last = _last_turn(top)
    checkpoints: list[Checkpoint] = []
    everywhere: set[int] = set()
    """turns with a checkpoint that applies to all rows"""
    names: set[tuple[int, str]] = set()
    for number, block in enumerate(top.checkpoints):
        turn = block.after_turn
        where = document.where(("checkpoints", number, "after_turn"))
        if last is not None and turn > last:
            problems.append(Problem(where, f"{turn} is never reached: the conversation has at most {last} turns"))
        if block.where is None:
            if turn in everywhere:
                message = f"duplicate checkpoint after turn {turn}; list all its graders in one"
                problems.append(Problem(where, message))
            everywhere.add(turn)
        graders = read_graders(block.graders, ("checkpoints", number, "graders"), document, folder, problems)
        for grader in graders:
            if (turn, grader.name) in names:
                message = f"duplicate grader name {grader.name!r} after turn {turn}"
                problems.append(Problem(document.where(("checkpoints", number)), message))
        names |= {(turn, grader.name) for grader in graders}
        if block.where is not None:
            graders = [grader.model_copy(update={"where": _both(block.where, grader.where)}) for grader in graders]
        checkpoints.append(Checkpoint(turn, block.on_failure == "stop", tuple(graders)))
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.after_turn)


def _last_turn(top: EvalFields) -> int | None:
    """Return the number of the last turn that a conversation can have; None if rows decide."""
    if not isinstance(top.follow_ups, list):
        return None
    follow_ups = len(top.follow_ups) if top.responder is None else top.responder.max_followups
    return None if isinstance(follow_ups, str) else 1 + follow_ups


def _both(one: str, other: str | None) -> str:
    return one if other is None else f"({one}) and ({other})"


def _assemble(blocks: _Blocks, document: Document, folder: Path, functions: Mapping[str, Any]) -> Eval:
    """Assemble an eval from its blocks."""
    top = blocks.top
    return Eval(
        name=top.name,
        folder=folder,
        document=document,
        dataset=top.dataset,
        samples=top.samples,
        target=blocks.target,
        system=top.system,
        prompt=top.prompt,
        messages=tuple(top.messages) if isinstance(top.messages, list) else (),
        messages_from=top.messages if isinstance(top.messages, str) else None,
        history=top.history,
        continuations=top.continuations,
        follow_ups=tuple(top.follow_ups) if isinstance(top.follow_ups, list) else (),
        follow_ups_from=_bare(top.follow_ups) if isinstance(top.follow_ups, str) else None,
        responder=blocks.responder,
        workspace=top.workspace,
        checkpoints=tuple(blocks.checkpoints),
        trials=top.trials,
        graders=tuple(blocks.graders),
        by=tuple(top.by),
        cluster=top.cluster,
        limits=top.limits,
        gate=top.gate if top.gate is not None and top.gate.present else None,
        same_prompt=top.same_prompt,
        hooks=top.hooks if top.hooks is not None and top.hooks.present else None,
        prices=top.prices,
        live_exports=blocks.live_exports,
        exports=blocks.exports,
        functions=functions,
        files=top.files,
        env=top.env,
    )


def _bare(formula: str) -> str:
    """Return an expression without the braces of a template."""
    return formula.strip().removeprefix("{{").removesuffix("}}").strip()


def target_name(target: TargetBlock) -> str:
    """Return the target's name in tables and directory names."""
    return target.label
