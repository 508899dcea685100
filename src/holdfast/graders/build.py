"""From what the eval file says to graders, and to what of them belongs into a grade's key."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.canonical import digest
from holdfast.errors import ConfigError, Problem
from holdfast.functions import load_function, split_reference
from holdfast.graders.checks import Choice, Exact, Number, Text
from holdfast.spec.grader_fields import (
    ChoiceGrader,
    ExactGrader,
    GraderBlock,
    JsonSchemaGrader,
    NumberGrader,
    PromptGrader,
    PythonGrader,
    TextGrader,
)
from holdfast.spec.source import source_fingerprint
from holdfast.spec.template import expression
from holdfast.targets.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.graders.types import InstantGrader, WaitingGrader
    from holdfast.spec.document import Location
    from holdfast.spec.load import Eval


REVISIONS: Final = {"prompt": 1, "choice": 1, "number": 1}
"""Raised when the way a grader of ours judges changes, so that its earlier verdicts are not served."""


def grader_identity(block: GraderBlock, spec: Eval) -> dict[str, Any]:
    """What of a grader can change its verdict."""
    identity = _own_identity(block, spec)
    return {**identity, "revision": REVISIONS[block.type]} if block.type in REVISIONS else identity


def _own_identity(block: GraderBlock, spec: Eval) -> dict[str, Any]:
    match block:
        case PythonGrader():
            path, name = split_reference(block.function, spec.folder)
            own = {"function": name, "source": source_fingerprint(path, spec.folder)}
            return {**block.identity(), **own}
        case PromptGrader():
            identity = block.identity()
            return {key: value for key, value in identity.items() if key not in ("base_url", "api_key_env")}
        case JsonSchemaGrader():
            return {**block.identity(), "schema_file": None, "json_schema": _schema(block, spec)}
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


def grader_places(spec: Eval) -> list[GraderPlace]:
    """All graders in the order in which they are asked: checkpoints' by turn, then those at the end."""
    places = [
        GraderPlace(
            f"checkpoint@{checkpoint.after_turn}/{block.name}",
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


def applies(block: GraderBlock, fields: Mapping[str, Any]) -> bool:
    """Whether a grader looks at the outputs of a row."""
    return block.where is None or bool(_where(block.where)(fields))


_where = lru_cache(maxsize=None)(expression)


def threshold(block: GraderBlock) -> float:
    """The score from which an output passes: all of it for checks, half for scores that people or models give."""
    if block.threshold is not None:
        return block.threshold
    return 0.5 if isinstance(block, PythonGrader | PromptGrader) else 1.0


def build_graders(spec: Eval) -> list[InstantGrader | WaitingGrader]:
    """All graders of an eval, ready to be opened."""
    return [_build(place.block, spec, place.where) for place in grader_places(spec)]


def _build(block: GraderBlock, spec: Eval, location: Location) -> InstantGrader | WaitingGrader:
    fingerprint = digest(grader_identity(block, spec))
    where = spec.document.where(location)
    match block:
        case ExactGrader():
            return Exact(block, fingerprint)
        case TextGrader():
            return Text(block, fingerprint)
        case ChoiceGrader():
            return Choice(block, fingerprint)
        case NumberGrader():
            return Number(block, fingerprint)
        case JsonSchemaGrader():
            from holdfast.graders.schema import JsonSchema

            try:
                return JsonSchema(block, _schema(block, spec), fingerprint)
            except ValueError as error:
                raise ConfigError([Problem(where, f"not a JSON Schema: {error}")]) from error
        case PythonGrader():
            from holdfast.graders.python import PythonCheck

            function = spec.functions.get(block.function) or load_function(block.function, spec.folder, where)
            return PythonCheck(block, function, fingerprint, where)
        case PromptGrader():
            from holdfast.graders.prompt import Judge

            return Judge(block, fingerprint, Prices(block.model or "", spec.prices))
        case _:
            raise AssertionError(f"no grader for {block.type}")


def _schema(block: JsonSchemaGrader, spec: Eval) -> dict[str, Any]:
    if block.json_schema is not None:
        return block.json_schema
    assert block.schema_file is not None
    path = (spec.folder / block.schema_file).resolve()
    if not path.is_relative_to(spec.folder.resolve()):
        raise ConfigError([Problem(str(path), "schema_file stays inside the eval file's folder")])
    try:
        schema = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError([Problem(str(path), f"not a JSON Schema: {error}")]) from error
    if not isinstance(schema, dict):
        raise ConfigError([Problem(str(path), "not a JSON Schema: it is not an object")])
    return schema
