"""The answer is JSON that fits a schema."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Self

import jsonschema_rs
import msgspec

from holdfast.graders.types import Verdict

if TYPE_CHECKING:
    from holdfast.graders.types import Case
    from holdfast.spec.grader_schema import JsonSchemaGrader

_FENCE = re.compile(r"```(?:json)?[^\S\n]*\n(.*?)```", re.DOTALL)
"""with one way to match each line end: with two, many empty lines and no closing fence would take for ever"""


class JsonSchema:
    """1 when the answer is JSON and fits, else 0 with the first reason."""

    def __init__(self, block: JsonSchemaGrader, schema: dict[str, Any], fingerprint: str) -> None:
        self.block = block
        self.fingerprint = fingerprint
        self._validator = jsonschema_rs.validator_for(schema, retriever=stay_here)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def check(self, case: Case) -> Verdict:
        """Parse and validate."""
        text = case.output.output
        try:
            value = msgspec.json.decode(_extracted(text) if self.block.extract else text)
        except msgspec.ValidationError as error:
            return Verdict(0.0, f"a number is too large to be checked: {error}")
        except (msgspec.DecodeError, RecursionError) as error:
            return Verdict(0.0, f"not JSON: {error}")
        misfit = next(iter(self._validator.iter_errors(value)), None)
        return Verdict(1.0) if misfit is None else Verdict(0.0, misfit.message[:500])


def stay_here(uri: str) -> dict[str, Any] | bool:
    """A schema is checked with what it brings: nothing is fetched because a file says so."""
    raise ValueError(f"{uri} is not fetched; put what it refers to under $defs")


def _extracted(text: str) -> str:
    if fenced := _FENCE.search(text):
        return fenced[1]
    starts = [place for place in (text.find("{"), text.find("[")) if place >= 0]
    end = max(text.rfind("}"), text.rfind("]"))
    return text[min(starts) : end + 1] if starts and end >= 0 else text
