"""The texts of graders: which of them are templates over the row.

No text of a grader is taken literally because nobody looked. A key either is rendered with the row, or refuses a text
that names a field. Braces that stand for themselves are written in one way in all keys, as Jinja2 has it; where no row
is needed for that, they are filled in when the file is read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Union, get_args, get_origin

from holdfast.spec.schema import Block
from holdfast.spec.template import TemplateSyntaxError, is_template, template

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.spec.document import Location

_AS_WRITTEN: Final = frozenset({"type", "name", "where"})
"""keys of graders that are names, or expressions without braces"""
LITERAL_BRACES: Final = "braces as such are written {% raw %}{{ }}{% endraw %}"

Refuse = Callable[["Location", str], None]
"""reports a text that cannot stand where it is"""


class GraderText(NamedTuple):
    """A template of a block."""

    location: Location
    """in the block"""
    source: str
    is_pattern: bool


def templates_in(block: Block) -> Iterator[GraderText]:
    """Yield the texts of a block that are rendered with the row, also those of blocks inside it."""
    for name, field in type(block).model_fields.items():
        is_read, is_pattern = name in block.templates, name in block.regexes
        yield from _texts(getattr(block, name), (field.alias or name,), is_read=is_read, is_pattern=is_pattern)


def _texts(value: Any, place: Location, *, is_read: bool, is_pattern: bool) -> Iterator[GraderText]:
    if isinstance(value, str):
        if is_read:
            yield GraderText(place, value, is_pattern)
    elif isinstance(value, Block):
        for inner in templates_in(value):
            yield inner._replace(location=(*place, *inner.location))
    elif isinstance(value, dict | list | tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(part, (*place, key), is_read=is_read, is_pattern=is_pattern)


def is_fixed(block: Block) -> bool:
    """Return True for a block that is the same for all rows."""
    return not any(is_template(text.source) for text in templates_in(block))


def settle_texts(schema: type[Block], keys: Mapping[str, Any], place: Location, refuse: Refuse) -> dict[str, Any]:
    """Return the keys of a block, as they are written, with braces filled in where no template is rendered."""
    names = {field.alias or name: name for name, field in schema.model_fields.items()}
    settled = dict(keys)
    for key, value in keys.items():
        name = names.get(key)
        if name is None or key in _AS_WRITTEN or name in (*schema.expressions, *schema.as_written):
            continue  # unknown keys are reported by the schema
        instead = schema.instead.get(name, "a `code` grader sees the row as `sample`")
        reading = _Reading(name in schema.templates, instead, refuse)
        settled[key] = reading.settle(value, schema.model_fields[name].annotation, (*place, key))
    return settled


class _Reading(NamedTuple):
    """How the texts of one key are read."""

    is_rendered: bool
    instead: str
    refuse: Refuse

    def settle(self, value: Any, annotation: Any, place: Location) -> Any:
        if isinstance(value, str):
            return value if self.is_rendered or not is_template(value) else self._fill_in(value, place)
        if isinstance(value, dict):
            kinds = list(_members(annotation))
            block = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Block)), None)
            if block is not None:
                return settle_texts(block, value, place, self.refuse)
            inner = next((get_args(kind)[-1] for kind in kinds if get_origin(kind) is dict), None)
            for key in value:
                if is_template(str(key)):
                    self.refuse((*place, key), f"the name of a key is no template; {LITERAL_BRACES}")
            return {key: self.settle(part, inner, (*place, key)) for key, part in value.items()}
        if isinstance(value, list):
            inner = next(
                (get_args(kind)[0] for kind in _members(annotation) if get_origin(kind) in (list, tuple)), None
            )
            return [self.settle(part, inner, (*place, number)) for number, part in enumerate(value)]
        return value

    def _fill_in(self, text: str, place: Location) -> str:
        try:
            compiled = template(text)
        except TemplateSyntaxError as error:
            self.refuse(place, f"not a valid template: {error.message}; {LITERAL_BRACES}")
            return text
        if compiled.names:
            shown = text if len(text) <= 60 else f"{text[:59]}…"
            self.refuse(
                place, f"is no template, and {shown!r} would be taken literally: {self.instead}; {LITERAL_BRACES}"
            )
            return text
        return compiled.render({})


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation allows, each without what pydantic is told about it."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from _members(part)
    else:
        yield annotation
