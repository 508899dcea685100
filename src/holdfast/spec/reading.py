"""Blocks of users' files checked by their models, with everything that is wrong in words and in its place."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from holdfast.errors import Problem
from holdfast.spec.fields import Block

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from holdfast.spec.document import Location


class Placed(Protocol):
    """A document, or anything else that knows where its keys stand."""

    def where(self, location: Location) -> str:
        """`file:line: key`."""


def validate_block(
    model: type[Block], data: Any, location: Location, document: Placed, problems: list[Problem]
) -> Block | None:
    """The block, or None after adding what is wrong with it to `problems`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            path = (*location, *item["loc"])
            owner = _model_at(model, item["loc"][:-1])
            problems.append(Problem(document.where(path), _explain(dict(item), owner)))
        return None


def _model_at(model: type[Block], location: Sequence[Any]) -> type[Block] | None:
    """The block in which a key stands, to suggest the keys it has."""
    current: type[Block] | None = model
    for part in location:
        if isinstance(part, int):
            continue  # an item of the list whose model is already found
        field = current.model_fields.get(part) if current is not None else None
        options = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        current = next((o for o in options if isinstance(o, type) and issubclass(o, Block)), None)
    return current


def _explain(item: dict[str, Any], owner: type[Block] | None) -> str:
    kind, key = item["type"], str(item["loc"][-1]) if item["loc"] else ""
    if kind == "extra_forbidden":
        if key in ("api_key", "key", "token"):
            return "keys are not written into files: name the environment variable with api_key_env"
        names = list(_written_names(owner)) if owner else []
        return f"unknown key{suggest(key, names)}" + (f"; known here: {', '.join(names)}" if names else "")
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(item["msg"]).removeprefix("Value error, ")
    if kind == "too_short":
        return "should have at least 1 item"  # pydantic speaks of tuples
    got = item.get("input")
    message = str(item["msg"]).removeprefix("Input ")
    shown = "" if isinstance(got, dict | list) else f", not {got!r}"
    return message + shown


def _written_names(model: type[Block]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield field.alias or name


def suggest(word: str, known: Iterable[str]) -> str:
    """The nearest known word, as the end of a message; empty where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
