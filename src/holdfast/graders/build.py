"""From what the eval file says to graders, and to what of them belongs into a grade's key."""

from __future__ import annotations

import base64
import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.canonical import digest, digest_bytes
from holdfast.errors import AttemptError, ConfigError, Problem
from holdfast.functions import function_source, load_function
from holdfast.graders.text import Choice, Exact, Number, Text
from holdfast.spec.file_grader_schema import CodeGrader, DiffGrader, FileGrader, ProgramGrader
from holdfast.spec.fingerprint import check_program, command_files, file_inside
from holdfast.spec.grader_schema import (
    ChoiceGrader,
    ExactGrader,
    GraderBlock,
    JsonSchemaGrader,
    MathGrader,
    NatGrader,
    NumberGrader,
    PromptGrader,
    PythonGrader,
    SimilarityGrader,
    TextGrader,
    TriggerGrader,
)
from holdfast.spec.template import RENDER_ERRORS, expression
from holdfast.spec.text_metric_schema import OverlapBlock
from holdfast.spec.tool_grader_schema import (
    ActionSequenceGrader,
    BehaviorGrader,
    SkillInvocationGrader,
    ToolBlock,
    ToolCallsGrader,
    ToolConstraintGrader,
)
from holdfast.spec.validation import suggest
from holdfast.targets.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.data.panels import Stale
    from holdfast.graders.types import InstantGrader, WaitingGrader
    from holdfast.spec.document import Location
    from holdfast.spec.load import Eval


REVISIONS: Final = {"prompt": 2, "choice": 1, "number": 1, "math": 1, "similarity": 1}
"""Raised when the way a grader of ours judges changes, so that its earlier verdicts are not served."""


def grader_identity(block: GraderBlock, spec: Eval, where: str = "") -> dict[str, Any]:
    """What of a grader can change its verdict; `where` is its place in the eval file, for messages."""
    identity = _own_identity(block, spec, where)
    return {**identity, "revision": REVISIONS[block.type]} if block.type in REVISIONS else identity


def revised(identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """A Python grader's identity for the rows of which it gets other values than it once did; None of other kinds."""
    return {**identity, "revision": 1} if identity.get("type") == "python" else None


def stale_rows(spec: Eval) -> dict[int, Stale]:
    """Tell, for each Python grader by its number, the rows of which it gets other values than it once did."""
    stale: dict[int, Stale] = {}
    for number, place in enumerate(grader_places(spec)):
        if isinstance(place.block, PythonGrader):
            from holdfast.graders.python import gets_other_values

            if (gets_others := gets_other_values(place.block, spec)) is not None:
                stale[number] = gets_others
    return stale


def _own_identity(block: GraderBlock, spec: Eval, where: str) -> dict[str, Any]:
    match block:
        case PythonGrader():
            name, source = function_source(block.function, spec.folder, where, spec.functions)
            return {**block.identity(), "function": name, "source": source}
        case PromptGrader():
            identity = block.identity()
            return {key: value for key, value in identity.items() if key not in ("base_url", "api_key_env")}
        case JsonSchemaGrader():
            return {**block.identity(), "schema_file": None, "json_schema": _schema(block, spec, where)}
        case DiffGrader():
            snapshots = {name: digest_bytes(data) for name, data in _snapshots(block, spec, where).items()}
            return {**block.identity(), "snapshots": snapshots}
        case TriggerGrader():
            return {**block.identity(), "skill_path": None, "skill": digest_bytes(_skill(block, spec, where).encode())}
        case NatGrader():
            return _evaluator_identity(block, spec, where)
        case ProgramGrader():
            return {**block.identity(), "files": command_files(spec.folder, (block.command, *block.args))}
        case _:
            return block.identity()


class GraderPlace(NamedTuple):
    """A grader of an eval: after a turn, or at the end."""

    name: str
    """as metrics have it: `checkpoint@2/name` after a turn"""
    block: GraderBlock
    turn: int | None
    stops: bool
    where: Location
    """in the eval file"""


def place_name(grader: str, turn: int | None) -> str:
    """Name a grader as metrics do, by where it stands."""
    return grader if turn is None else f"checkpoint@{turn}/{grader}"


def grader_places(spec: Eval) -> list[GraderPlace]:
    """All graders in the order in which they are asked: checkpoints' by turn, then those at the end."""
    places = [
        GraderPlace(
            place_name(block.name, checkpoint.after_turn),
            block,
            checkpoint.after_turn,
            checkpoint.stops,
            ("checkpoints", number, "graders", inner),
        )
        for number, checkpoint in enumerate(spec.checkpoints)
        for inner, block in enumerate(checkpoint.graders)
    ]
    return places + [
        GraderPlace(block.name, block, None, False, ("graders", number)) for number, block in enumerate(spec.graders)
    ]


def refuse_unsure(block: GraderBlock, fields: Mapping[str, Any]) -> None:
    """Raise AttemptError where a grader's `where` does not say whether it looks at the outputs of a row."""
    try:
        expression(block.where or "")(fields)
    except RENDER_ERRORS as error:
        raise AttemptError("grader", f"`where` cannot be evaluated for this row: {error}", retry=False) from error


def threshold(block: GraderBlock) -> float | None:
    """The score from which an output passes; None where the grader itself decides.

    All of it for checks, half for scores that people or models give.
    """
    match block:
        case GraderBlock(threshold=float() as limit):
            return limit
        case TriggerGrader():
            # An overlap of 0.6 is a trigger; by `negative` the score is what is left to 1, and has to be more.
            return 0.6 if block.mode == "positive" else math.nextafter(1 - 0.6, 1)
        case GraderBlock(decides=True):
            return None
        case PythonGrader() | NatGrader() | PromptGrader(prompt=None):
            return 0.5
        case SimilarityGrader():
            return 0.8
        case OverlapBlock():
            return 0.5
        case _:
            return 1.0


def build_graders(spec: Eval) -> list[InstantGrader | WaitingGrader]:
    """All graders of an eval, ready to be opened."""
    return [_build(place.block, spec, place.where) for place in grader_places(spec)]


def _build(block: GraderBlock, spec: Eval, location: Location) -> InstantGrader | WaitingGrader:
    where = spec.document.where(location)
    fingerprint = digest(grader_identity(block, spec, where))
    match block:
        case ExactGrader():
            return Exact(block, fingerprint)
        case TextGrader():
            return Text(block, fingerprint)
        case ChoiceGrader():
            return Choice(block, fingerprint)
        case NumberGrader():
            return Number(block, fingerprint)
        case SimilarityGrader():
            _needs("rapidfuzz", "rapidfuzz", where)
            from holdfast.graders.similarity import Similarity

            return Similarity(block, fingerprint)
        case OverlapBlock():
            from holdfast.graders.text_metrics import PACKAGES, build_overlap

            _needs(*PACKAGES[block.type], where)
            try:
                return build_overlap(block, fingerprint)
            except (ImportError, RuntimeError) as error:  # tokenizers of Japanese and Korean have packages of their own
                raise ConfigError([Problem(where, _first_line(error))]) from error
        case MathGrader():
            _needs("math_verify", "math-verify", where)
            from holdfast.graders.maths import Mathematics

            return Mathematics(block, fingerprint)
        case JsonSchemaGrader():
            from holdfast.graders.schema import JsonSchema

            try:
                return JsonSchema(block, _schema(block, spec, where), fingerprint)
            except ValueError as error:
                raise ConfigError([Problem(where, f"not a JSON Schema: {_first_line(error)}")]) from error
        case PythonGrader():
            from holdfast.graders.python import PythonCheck

            function = load_function(block.function, spec.folder, where, spec.functions)
            limit = threshold(block)
            assert limit is not None
            return PythonCheck(block, function, fingerprint, where, limit)
        case PromptGrader():
            from holdfast.graders.judge import Judge

            return Judge(block, fingerprint, Prices(block.model or "", spec.prices), where)
        case NatGrader():
            from holdfast.graders.nat import NatEvaluator

            return NatEvaluator(block, spec.folder, fingerprint, where)
        case TriggerGrader():
            from holdfast.graders.trigger import Trigger

            try:
                return Trigger(block, _skill(block, spec, where), fingerprint)
            except ValueError as error:
                raise ConfigError([Problem(where, f"{block.skill_path or 'skill'}: {error}")]) from error
        case ToolBlock():
            return _of_calls(block, fingerprint, where)
        case _:
            return _of_files(block, spec, fingerprint, where)


def _of_calls(block: ToolBlock, fingerprint: str, where: str) -> InstantGrader:
    from holdfast.graders import tool_graders as tools

    try:
        match block:
            case BehaviorGrader():
                return tools.Behavior(block, fingerprint)
            case ActionSequenceGrader():
                return tools.ActionSequence(block, fingerprint)
            case SkillInvocationGrader():
                return tools.SkillInvocation(block, fingerprint)
            case ToolCallsGrader():
                return tools.ToolCalls(block, fingerprint)
            case ToolConstraintGrader():
                return tools.ToolConstraint(block, fingerprint)
            case _:
                raise AssertionError(f"no grader for {block.type}")
    except ValueError as error:  # everything else in it was checked when the file was read
        raise ConfigError([Problem(where, f"not a JSON Schema: {_first_line(error)}")]) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _of_files(block: GraderBlock, spec: Eval, fingerprint: str, where: str) -> WaitingGrader:
    from holdfast.graders import files, programs

    match block:
        case FileGrader():
            return files.File(block, fingerprint)
        case DiffGrader():
            return files.Diff(block, _snapshots(block, spec, where), fingerprint)
        case ProgramGrader():
            if spec.workspace is None or "/" not in block.command:  # else it may be something that the agent makes
                check_program(block.command, spec.folder, where)
            return programs.Program(block, spec.folder, fingerprint)
        case CodeGrader():
            code = programs.Code(block, fingerprint)
            if code.lacks is not None:
                raise ConfigError([Problem(where, f"needs {code.lacks}, which is not on the PATH")])
            return code
        case _:
            raise AssertionError(f"no grader for {block.type}")


def _needs(module: str, package: str, where: str) -> None:
    if find_spec(module) is None:
        raise ConfigError([Problem(where, f"needs the package {package}")], remedy=f"pip install {package}")


def _snapshots(block: DiffGrader, spec: Eval, where: str) -> dict[str, bytes]:
    names = {file.snapshot for file in block.expected_files if file.snapshot is not None}
    return {
        name: _content(block.snapshots[name]) if name in block.snapshots else file_inside(spec.folder, name, where)
        for name in sorted(names)
    }


def _content(value: str | Mapping[Any, str]) -> bytes:
    return value.encode() if isinstance(value, str) else base64.b64decode(value["base64"])


def _evaluator_identity(block: NatGrader, spec: Eval, where: str) -> dict[str, Any]:
    from holdfast.formats.nat.config import evaluator_part, identity_of, read_config

    identity = {key: value for key, value in block.identity().items() if key not in ("config_file", "override")}
    data: dict[str, Any] = {}
    if block.config_file is not None:
        data = read_config(spec.folder / block.config_file, block.override)
    evaluator = block.evaluator
    if isinstance(evaluator, str):
        section = data.get("eval") if isinstance(data.get("eval"), dict) else {}
        known = section.get("evaluators") if isinstance(section, dict) else {}
        known = known if isinstance(known, dict) else {}
        if evaluator not in known:
            said = f"{block.config_file} has no evaluator {evaluator!r}{suggest(evaluator, known)}"
            raise ConfigError([Problem(where, said)])
        evaluator = known[evaluator]
    assert evaluator is not None
    part = {"evaluator": evaluator, **evaluator_part(data, evaluator)}
    return {**identity, "evaluator": None, **identity_of(part, spec.folder)}


def _skill(block: TriggerGrader, spec: Eval, where: str) -> str:
    if block.skill is not None:
        return block.skill
    name = str(block.skill_path)
    if (spec.folder / name).is_dir():
        name = f"{name}/SKILL.md"
    return file_inside(spec.folder, name, where).decode("utf-8", "replace")


def _schema(block: JsonSchemaGrader, spec: Eval, where: str) -> dict[str, Any]:
    if block.json_schema is not None:
        return block.json_schema
    assert block.schema_file is not None
    data = file_inside(spec.folder, block.schema_file, where)
    try:
        schema = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([Problem(where, f"{block.schema_file} is not a JSON Schema: {error}")]) from error
    if not isinstance(schema, dict):
        raise ConfigError([Problem(where, f"{block.schema_file} is not a JSON Schema: it is not an object")])
    return schema
