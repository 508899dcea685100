"""Grades answers by a JSON Schema."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

import msgspec
from pydantic import Field

from holdfast.dialects.reading import after_thoughts
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.grader_schema import GraderBlock
from holdfast.spec.schema import compile_json_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin

_FENCE: Final = re.compile(r"^[^\S\n]*```[^\S\n]*(\w*)[^\n]*$", re.MULTILINE)
_OPENING: Final = re.compile(r"\{(?=\s{0,99}[\"}])|\[(?=\s{0,99}[\[{\"\]\d-])|\[(?=\s{0,99}(?:true|false|null)\b)")
_MOST_BROKEN: Final = 1_000
"""limit of values that cannot be decoded: each costs a pass over the text before it"""
_DECODER: Final = json.JSONDecoder(strict=False)
_NOTE: Final = re.compile(r"\[[\d\s,]*\]")
_INTRODUCED: Final = re.compile(r"(?:\A|[\n:])[\s*_`]*\Z")
_SEEN: Final = 40
"""characters before a value that may introduce it"""


class JsonSchemaGrader(GraderBlock):
    """Checks that the answer is JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """JSON Schema that the answer must fit."""
    schema_file: str | None = None
    """File with the JSON Schema, in the eval file's folder."""
    extract: bool = False
    """Look for the JSON in the last ```` ```json ```` block, or take the last object or list, instead of parsing the
    whole answer."""

    checks: ClassVar[tuple[str, ...]] = ("json_schema", "schema_file")
    templates: ClassVar[tuple[str, ...]] = ()


class JsonSchema(InstantGrader):
    """Scores 1 if the answer is JSON that is valid under the schema, else 0 with the first error."""

    schema = JsonSchemaGrader
    block: JsonSchemaGrader

    def __init__(self, block: JsonSchemaGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._validator = compile_schema(_read_schema(block, origin), origin)

    @classmethod
    def identity(cls, block: JsonSchemaGrader, origin: Origin) -> dict[str, Any]:
        """Return the schema itself, from the block or its file."""
        return {**block.identity(), "schema_file": None, "json_schema": _read_schema(block, origin)}

    def check(self, case: Case) -> Verdict:
        """Parse the answer and validate it."""
        text = case.output.output
        try:
            value = msgspec.json.decode(_extract(after_thoughts(text)) if self.block.extract else text)
        except msgspec.ValidationError as error:
            return Verdict(0.0, f"a number is too large to be checked: {error}")
        except (msgspec.DecodeError, RecursionError) as error:
            return Verdict(0.0, f"not JSON: {error}")
        misfit = next(iter(self._validator.iter_errors(value)), None)
        return Verdict(1.0) if misfit is None else Verdict(0.0, misfit.message[:500])


def compile_schema(schema: dict[str, Any], origin: Origin) -> Any:
    """Compile a JSON Schema; raise ConfigError if it is invalid."""
    try:
        return compile_json_schema(schema)
    except ValueError as error:
        raise origin.error(str(error)) from error


def _read_schema(block: JsonSchemaGrader, origin: Origin) -> dict[str, Any]:
    if block.json_schema is not None:
        return block.json_schema
    assert block.schema_file is not None
    return origin.read_schema(block.schema_file)


class _Part(NamedTuple):
    start: int
    text: str


def _extract(text: str) -> str:
    """Return the JSON that a text concludes with: its last block of JSON, or a value introduced after that block.

    Without such blocks it is the last object or list. Numbers in brackets are footnotes unless there is nothing else.
    """
    blocks, prose = _split(text)
    outermost = [*_values(prose)]
    values = [each for each in outermost if not _NOTE.fullmatch(each.text)] or ([] if blocks else outermost)
    if blocks:
        values = [
            each
            for each in values
            if each.start > blocks[-1].start
            and each.text != "{}"
            and _INTRODUCED.search(prose[max(0, each.start - _SEEN) : each.start])
        ]
    parts = values or blocks
    return parts[-1].text if parts else text


def _split(text: str) -> tuple[list[_Part], str]:
    """Return the fenced blocks that may be JSON, and the text with blanks in place of all fenced blocks."""
    blocks: list[_Part] = []
    prose, place = [], 0
    fences = _FENCE.finditer(text)
    for opening in fences:
        closing = next(fences, None)
        end = len(text) if closing is None else closing.start()
        content = text[opening.end() : end]
        if opening[1].casefold() in ("json", "jsonc", "json5") or (
            not opening[1] and content.lstrip()[:1] in ("{", "[")
        ):
            blocks.append(_Part(opening.start(), content))
        prose += [text[place : opening.start()], " " * ((closing.end() if closing else end) - opening.start())]
        place = closing.end() if closing else end
    return blocks, "".join([*prose, text[place:]])


def _values(text: str) -> Iterator[_Part]:
    """Yield the outermost objects and lists of a text; broken ones are skipped up to the place of the error."""
    place = broken = 0
    while broken < _MOST_BROKEN and (match := _OPENING.search(text, place)) is not None:
        try:
            _, place = _DECODER.raw_decode(text, match.start())
        except json.JSONDecodeError as error:
            if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
                yield _Part(match.start(), text[match.start() :])  # the text was cut off inside this value
                return
            place, broken = max(match.end(), error.pos), broken + 1
        except RecursionError:
            return
        else:
            yield _Part(match.start(), text[match.start() : place])
