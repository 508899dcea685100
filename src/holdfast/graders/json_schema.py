"""Grades answers by a JSON Schema."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.content_grader_schema import JsonSchemaGrader

if TYPE_CHECKING:
    from holdfast.graders.types import Case
    from holdfast.spec.origin import Origin

_FENCE = re.compile(r"```(?:json)?[^\S\n]*\n(.*?)```", re.DOTALL)
"""with one way to match each line end: with two, many empty lines and no closing fence would take forever"""


class JsonSchema(InstantGrader):
    """Scores 1 when the answer is JSON that is valid under the schema, else 0 with the first reason."""

    schema = JsonSchemaGrader
    block: JsonSchemaGrader

    def __init__(self, block: JsonSchemaGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._validator = compile_schema(_read_schema(block, origin), origin)

    @classmethod
    def identity(cls, block: JsonSchemaGrader, origin: Origin) -> dict[str, Any]:
        """Return the schema itself, wherever it is written."""
        return {**block.identity(), "schema_file": None, "json_schema": _read_schema(block, origin)}

    def check(self, case: Case) -> Verdict:
        """Parse the answer and validate it."""
        text = case.output.output
        try:
            value = msgspec.json.decode(_extract(text) if self.block.extract else text)
        except msgspec.ValidationError as error:
            return Verdict(0.0, f"a number is too large to be checked: {error}")
        except (msgspec.DecodeError, RecursionError) as error:
            return Verdict(0.0, f"not JSON: {error}")
        misfit = next(iter(self._validator.iter_errors(value)), None)
        return Verdict(1.0) if misfit is None else Verdict(0.0, misfit.message[:500])


def compile_schema(schema: dict[str, Any], origin: Origin) -> Any:
    """Compile a JSON Schema; raises ConfigError where it is none."""
    import jsonschema_rs

    try:
        return jsonschema_rs.validator_for(schema, retriever=_refuse_retrieval)
    except ValueError as error:
        raise origin.error(f"not a JSON Schema: {str(error).partition(chr(10))[0]}") from error


def _read_schema(block: JsonSchemaGrader, origin: Origin) -> dict[str, Any]:
    if block.json_schema is not None:
        return block.json_schema
    assert block.schema_file is not None
    return origin.read_schema(block.schema_file)


def _refuse_retrieval(uri: str) -> dict[str, Any] | bool:
    raise ValueError(f"{uri} is not fetched; put what it refers to under $defs")


def _extract(text: str) -> str:
    if fenced := _FENCE.search(text):
        return fenced[1]
    starts = [place for place in (text.find("{"), text.find("[")) if place >= 0]
    end = max(text.rfind("}"), text.rfind("]"))
    return text[min(starts) : end + 1] if starts and end >= 0 else text
