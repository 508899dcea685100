"""Validates blocks of users' files, and collects problems and notices, each with its place.

Everything is reported at once rather than only the first mistake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from pydantic import ValidationError

from holdfast.errors import ConfigError, Problem
from holdfast.spec.schema import Block

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from holdfast.spec.document import Location


class Placed(Protocol):
    """A document, or another object that knows the places of its keys."""

    def where(self, location: Location) -> str:
        """Return `file:line: key`."""


_PLAIN: Final = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
"""expected values by pydantic's error types, in the words of YAML's users"""
_KEYS: Final = {"target": ("model", "python", "command", "http"), "graders": ("type", "name", "threshold")}
"""keys of mappings that have several schemas"""


_PARAMETERS: Final = frozenset(
    {"temperature", "max_tokens", "max_completion_tokens", "top_p", "top_k", "min_p", "seed", "stop", "n", "logprobs"}
    | {"presence_penalty", "frequency_penalty", "reasoning_effort", "response_format", "logit_bias"}
)
"""parameters of a request that are often misplaced next to `model`"""
_ALIASES: Final = {
    "url": ("base_url", "http"),
    "endpoint": ("base_url", "http"),
    "api_base": ("base_url",),
    "file": ("path",),
    "regex": ("regex_match",),
}
"""other tools' names for keys"""


def validate_block(
    model: type[Block], data: Any, location: Location, document: Placed, problems: list[Problem]
) -> Block | None:
    """Return the block, or None after adding its problems to `problems`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        explanations: dict[Location, list[str]] = {}
        values: dict[Location, Any] = {}
        for item in error.errors(include_url=False):
            place = _written(data, item["loc"], item["type"])
            explanations.setdefault(place, []).append(_explain(item["type"], item["msg"], place, model))
            values[place] = item["input"]
        for place, listed in explanations.items():
            if all(each.startswith("should ") for each in listed) and _holds_another(place, explanations):
                continue  # the value has the shape of one member of a union, and the problem is inside it
            first, *others = dict.fromkeys(listed)  # several for a union of types
            message = " or ".join([first, *(other.removeprefix("should be ") for other in others)])
            if first.startswith("should "):
                message += f", not {_describe(values[place])}"
            problems.append(Problem(document.where((*location, *place)), message))
        return None


def _holds_another(place: Location, places: Iterable[Location]) -> bool:
    return any(len(other) > len(place) and other[: len(place)] == place for other in places)


def _written(data: Any, location: Location, kind: str) -> Location:
    """Return the part of a location that is in the file: pydantic adds the names of a union's members."""
    place: list[str | int] = []
    for part in location:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            continue
        place.append(part)
    return (*place, location[-1]) if kind == "missing" else tuple(place)


def _model_at(model: type[Block], location: Sequence[Any]) -> type[Block] | None:
    """Return the schema of the block that holds a key, to suggest its keys."""
    current: type[Block] | None = model
    for part in location:
        if isinstance(part, int):
            continue  # an item of a list has the list's schema
        field = current.model_fields.get(part) if current is not None else None
        current = next(_blocks(field.annotation), None) if field else None
    return current


def _blocks(annotation: Any) -> Iterator[type[Block]]:
    """Yield the blocks that an annotation names, also inside unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _blocks(part)


def _explain(kind: str, message: str, place: Location, model: type[Block]) -> str:
    if kind == "extra_forbidden":
        key, owner = str(place[-1]), _model_at(model, place[:-1])
        names = list(_written_names(owner)) if owner else []
        if key in ("api_key", "key", "token") and "tokens" not in names:
            return "keys are not written into files: name the environment variable with api_key_env"
        if key == "max_tokens" and "token_budget" in names:
            return "the length of a reply is target.params.max_tokens, a budget for the whole run limits.token_budget"
        if key in _PARAMETERS and "params" in names:
            return f"unknown key; parameters of a request go under `params`: params: {{{key}: …}}"
        alias = next((name for name in _ALIASES.get(key, ()) if name in names), None)
        hint = f" (did you mean {alias!r}?)" if alias else suggest(key, names)
        return f"unknown key{hint}" + (f"; known here: {', '.join(names)}" if names and not hint else "")
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind == "too_short":
        return "needs at least 1 item"  # pydantic would mention tuples
    expected = _PLAIN.get(kind)
    if expected == "a mapping":
        block = _model_at(model, place)
        keys = list(_written_names(block))[:6] if block else _KEYS.get(next((p for p in place if p in _KEYS), ""), ())
        expected += f" with keys such as {', '.join(keys)}" if keys else ""
    return message.removeprefix("Input ") if expected is None else f"should be {expected}"


def _describe(value: Any) -> str:
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)


def _written_names(model: type[Block]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield field.alias or name


def suggest(word: str, names: Iterable[str]) -> str:
    """Return the closest name as the end of a message; empty if no name is close."""
    import difflib

    close = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


class Findings:
    """Problems, which are errors, and notices, which are not."""

    def __init__(self, notices: Iterable[str] = ()) -> None:
        """Begin with notices that are complete sentences."""
        self.problems: list[Problem] = []
        self._complete = list(notices)
        self._noticed: dict[tuple[str, str], list[str]] = {}
        """places by key and message"""

    def wrong(self, document: Placed, location: Location, message: str) -> None:
        """Add a problem at a place."""
        self.problems.append(Problem(document.where(location), message))

    def notice(self, document: Placed, location: Location, message: str) -> None:
        """Add a notice at a place."""
        name = str(location[-1]) if location else ""
        places = self._noticed.setdefault((name, message), [])
        if (place := document.where(location)) not in places:
            places.append(place)

    def add_notices(self, notices: Iterable[str]) -> None:
        """Add notices that are complete sentences."""
        self._complete.extend(notices)

    @property
    def notices(self) -> tuple[str, ...]:
        """Return all notices, equal ones only once."""
        lines = list(self._complete)
        for (_, message), places in self._noticed.items():
            more = f" (and in {len(places) - 1} more places)" if len(places) > 1 else ""
            lines.append(f"{places[0]}: {message}{more}")
        return tuple(dict.fromkeys(lines))

    def raise_problems(self) -> None:
        """Raise ConfigError if there are problems."""
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))
