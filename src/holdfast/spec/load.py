"""Loads an eval file into an `Eval`, or reports everything that is wrong with it.

Overrides from the command line (`a.b=value`) are applied first, then each block is read by its schema, and the eval is
checked as a whole. A check yields every problem with its location, so that all of them are reported at once. Graders
that can hardly fail may be intended, and only get a notice.
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from holdfast.errors import ConfigError, Problem, UsageError, VersionError, suggest
from holdfast.spec.document import Document, Location, read_document, read_value
from holdfast.spec.eval import TARGET, Checkpoint, Eval
from holdfast.spec.eval_schema import RUN_METRICS, SETTINGS, EvalFields, Selection, read_exports, read_live_exports
from holdfast.spec.load_graders import read_graders, with_player
from holdfast.spec.providers import provider_of
from holdfast.spec.schema import SCHEMA_VERSION, as_dataset, validate_block
from holdfast.spec.target_schema import ModelTarget, read_target, target_kind
from holdfast.spec.template import TemplateSyntaxError, expression
from holdfast.spec.trial_limits import with_defaults
from holdfast.versions import check_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

    from holdfast.spec.eval_schema import (
        ExportBlock,
        GateBlock,
        LiveExport,
        ResponderBlock,
    )
    from holdfast.spec.grader_schema import GraderBlock
    from holdfast.spec.target_schema import TargetBlock


Override = tuple[tuple[str, ...], Any]
"""a path of keys, and its value"""
_SELECTIONS: Final = (("dataset", "limit"), ("dataset", "ids"), ("dataset", "tags"))
_GATED: Final = ("score", "low", "high", "corpus")
"""numbers of a grader that can be gated as `GRADER/NUMBER`, in addition to `pass@k` and `pass^k`"""
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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


def parse_override(text: str) -> Override:
    """Parse `limits.retries=2` into a path and a value; the value is read as YAML."""
    path, equals, value = text.partition("=")
    if not equals or not path or not all(path.split(".")):
        raise UsageError(
            f"{text!r} is not an override",
            remedy="Write overrides as key=value, for example limits.concurrency=8 or dataset.limit=100.",
        )
    from ruamel.yaml.error import YAMLError

    keys = tuple(path.split("."))
    if keys == ("gate", "baseline"):
        return keys, value or None  # an id: YAML would read 12345678 and 5e031122 as numbers
    if value.lstrip().startswith("{{"):
        return keys, value  # a template: YAML would read it as nested mappings
    try:
        parsed = read_value(value) if value else None
    except (YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{text!r}: the value is not valid YAML", remedy="Quote the value, as in 'key=\"a, b\"'."
        ) from error
    if isinstance(parsed, dict) and not value.lstrip().startswith("{"):
        return keys, value  # `Answer in the form: N` is a text; mappings are written with braces here
    return keys, parsed


def apply_override(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set a value in place, creating mappings on the way. A list is indexed by number, graders also by name."""
    if path[0] == "dataset" and len(path) > 1:
        data["dataset"] = as_dataset(data.get("dataset"))
    node: Any = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, list):
            position = _position(node, part, path[: depth + 1])
            if last:
                node[position] = value
            else:
                node = node[position]
        elif isinstance(node, dict):
            if last:
                config = node.get("config")
                if isinstance(config, dict) and part in config:
                    config[part] = value  # parameters of a grader that are written here would hide the override
                else:
                    node[part] = value
            elif not isinstance(node.get(part), dict | list):
                node[part] = {}
                node = node[part]
            else:
                node = node[part]


def _position(node: list[Any], part: str, path: tuple[str, ...]) -> int:
    if part.isdigit() and int(part) < len(node):
        return int(part)
    for position, inner in enumerate(node):
        if isinstance(inner, dict) and part in (inner.get("name"), inner.get("type")):
            return position
    names = [str(inner.get("name") or inner.get("type")) for inner in node if isinstance(inner, dict)]
    listed = f"there are {', '.join(names)}" if names and len(names) == len(node) else f"the list has {len(node)}"
    raise UsageError(f"{'.'.join(path)}: there is no such entry{suggest(part, names)}; {listed}")


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
        follow_ups_from=top.follow_ups if isinstance(top.follow_ups, str) else None,
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


def data_problems(data: dict[str, Any]) -> Iterator[tuple[Location, str]]:
    """Yield problems of the file's data as such, whatever its keys mean."""
    for location in _not_finite(data):
        if location[:1] != ("samples",):  # the dataset reports the ones in rows
            yield location, "NaN and infinity are not valid JSON numbers"
    has_dataset, has_samples = (data.get(key) is not None for key in ("dataset", "samples"))
    if has_dataset and has_samples:
        yield ("samples",), "give either `dataset` or `samples`, not both"
    elif not has_dataset and not has_samples:
        yield (), "give either `dataset` or `samples`"


def _not_finite(node: Any, location: Location = ()) -> Iterator[Location]:
    """Yield the locations of NaN and infinity, which YAML writes as .nan and .inf."""
    if isinstance(node, float) and not math.isfinite(node):
        yield location
    elif isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _not_finite(value, (*location, key))


def conversation_problems(top: EvalFields) -> Iterator[tuple[Location, str]]:
    """Yield keys of the conversation that contradict each other, and missing ones."""
    of_the_row = top.responder is not None and isinstance(top.responder.max_followups, str)
    if top.responder is not None and top.follow_ups and not (of_the_row and isinstance(top.follow_ups, str)):
        yield ("responder",), "give either follow_ups or a responder, not both"
    if top.messages is None:
        if top.prompt is None:
            yield ("prompt",), "is missing; give either `prompt` or `messages`"
        return
    others = {"prompt": top.prompt, "history": top.history, "continuations": top.continuations}
    for key, value in others.items():
        if value is not None:
            yield (key,), f"`messages` are the whole conversation so far: leave out `{key}`"
    if isinstance(top.messages, list) and top.messages[-1].role != "user":
        location = ("messages", len(top.messages) - 1, "role")
        yield location, "the last message is the user's, which the target answers"


def gate_problems(gate: GateBlock, graders: Set[str], trials: int) -> Iterator[tuple[Location, str]]:
    """Yield wrong names under `gate`; `holdfast gate --min` accepts the same names of metrics."""
    for name in graders & gate.model_fields_set & set(SETTINGS):
        message = "is both a setting of the gate and the name of a grader: rename the grader"
        yield ("gate", name), message
    for name in gate.minima:
        if (problem := _gate_problem(name, graders, frozenset(RUN_METRICS), trials)) is not None:
            yield ("gate", name), problem


def _gate_problem(name: str, graders: Set[str], whole: Set[str], trials: int) -> str | None:
    """Describe the problem with the name of a metric; None if it is right."""
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


def eval_problems(spec: Eval) -> Iterator[tuple[Location, str]]:
    """Yield contradictions between blocks that are valid by themselves."""
    yield from _misnamed_parts(spec)
    for place, grader in spec.placed_graders():
        if grader.needs_workspace and spec.workspace is None:
            yield place, f"{grader.type} looks at files, but the eval has no workspace: add `workspace: {{}}`"
    yield from _likelihood_problems(spec)
    yield from _limit_problems(spec)
    for each in spec.templates():
        try:
            each.compile()
        except TemplateSyntaxError as error:
            yield each.location, f"not a valid template: {error.message}"
    for place, formula in spec.expressions():
        try:
            expression(formula)
        except TemplateSyntaxError as error:
            yield place, f"not a valid expression: {error.message}"


def _misnamed_parts(spec: Eval) -> Iterator[tuple[Location, str]]:
    """Yield parts under `files` and `env` that the eval does not have, and invalid names of variables."""
    parts = [TARGET, *dict.fromkeys(block.name for _, block in spec.placed_graders())]
    for key in ("files", "env"):
        named = getattr(spec, key)
        for part in named if isinstance(named, dict) else ():
            if part not in parts:
                yield (key, part), f"neither the target nor a grader has this name{suggest(part, parts)}"
    lists = [((part,), names) for part, names in spec.env.items()] if isinstance(spec.env, dict) else [((), spec.env)]
    for place, names in lists:
        for number, name in enumerate(names):
            if not _VARIABLE.fullmatch(name):
                message = f"{name!r} is not the name of an environment variable; give names without values"
                yield ("env", *place, number), message


def _likelihood_problems(spec: Eval) -> Iterator[tuple[Location, str]]:
    """Yield keys that contradict `continuations`, and graders that need them."""
    if spec.continuations is None:
        for place, grader in spec.placed_graders():
            if grader.type == "likelihood":
                yield place, "likelihood compares continuations, but the eval has no `continuations`: add them"
        return
    target = spec.target
    if not isinstance(target, ModelTarget):
        yield ("continuations",), "only a model has likelihoods: use a `model` as target, or leave out `continuations`"
        return
    provider, _ = provider_of(target.model, target.base_url)
    if not provider.completions:
        yield (
            ("target", "model"),
            f"{target.model} cannot be asked for likelihoods: name a server that has them as `base_url`, such as vLLM",
        )
    elif target.api != "completions":
        yield (
            ("target", "api"),
            "likelihoods are of plain text, without a chat template: set `api: completions`",
        )
    for key, value in {"tools": target.tools, "stream": target.stream, "schema": target.json_schema}.items():
        if value:
            yield ("target", key), f"`continuations` ask for likelihoods, not for a reply: leave out `{key}`"
    conversation = {
        "follow_ups": spec.follow_ups or spec.follow_ups_from,
        "responder": spec.responder,
        "checkpoints": spec.checkpoints,
    }
    for key, value in conversation.items():
        if value:
            yield (key,), f"`continuations` end the conversation with the prompt: leave out `{key}`"


def _limit_problems(spec: Eval) -> Iterator[tuple[Location, str]]:
    """Yield limits that cannot be enforced for the target."""
    limits, target = spec.limits, spec.target
    if limits.trial is not None:
        for name in limits.trial.model_dump(exclude_none=True):
            if not (target.counts_calls or (name == "time" and target.works_alone)):
                message = (
                    "the target's model calls are not seen one by one: limits of a trial are for agents, "
                    "functions, programs behind the proxy and models with tools"
                )
                yield ("limits", "trial", name), message
    elif limits.on_limit == "score" and not target.works_alone:
        yield ("limits", "on_limit"), "only agents, programs and functions can be scored at a time-out: add `trial`"
    if limits.on_exit is not None and not target.has_exit_code:
        yield ("limits", "on_exit"), "the target is not a program, so it has no exit code"


def vacuous_checks(spec: Eval) -> Iterator[str]:
    """Yield a notice for each check that passes, or fails, whatever the answer is."""
    for location, block in spec.placed_graders():
        for warning in block.idle_checks():
            yield f"{spec.document.where(location)}: {warning}"
    if spec.graders and all(block.weight == 0 for block in spec.graders):
        where = spec.document.where(("graders",))
        yield f"{where}: every grader has weight 0, so trials have no overall score and none passes"
