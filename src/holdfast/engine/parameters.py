"""Whether every row has what users' functions ask for. A function is never called with a value that is made up."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import ConfigError, Problem
from holdfast.graders.build import grader_places

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from holdfast.conversation.simulated_user import Player
    from holdfast.data.dataset import Survey
    from holdfast.functions import Function
    from holdfast.graders.types import InstantGrader, WaitingGrader
    from holdfast.plan.identity import RunIdentity
    from holdfast.spec.document import Location
    from holdfast.targets.types import Target


class _Asking(NamedTuple):
    """A function in its place in the eval."""

    where: Location
    function: Function
    lacking: Callable[[Collection[str]], list[str]]
    """the parameters that a row with these fields has no value for"""
    sought: Callable[[str], Sequence[str]]
    """the fields that may hold the value of a parameter"""
    grader: int | None
    """its number, where it is a grader and may not look at all rows"""


def check_parameters(
    found: RunIdentity,
    target: Target | None,
    player: Player | None,
    graders: Sequence[InstantGrader | WaitingGrader],
) -> None:
    """Raise ConfigError where a function of the eval asks for a value that a row does not have."""
    problems: list[Problem] = []
    remedy = ""
    for asking in _functions(found, target, player, graders):
        for name, message in _lacks(found.survey, asking):
            problems.append(Problem(found.spec.document.where(asking.where), f"{asking.function} {message}"))
            is_expected = len(asking.sought(name)) > 1
            other = 'say where the value is: expected: "{{ FIELD }}"' if is_expected else "give the parameter a default"
            offered = ", ".join(asking.function.offered)
            remedy = f"Add the field to the rows, or {other}. Beside fields, a function may ask for {offered}."
    if problems:
        raise ConfigError(problems, remedy=remedy)


def _functions(
    found: RunIdentity,
    target: Target | None,
    player: Player | None,
    graders: Sequence[InstantGrader | WaitingGrader],
) -> Iterator[_Asking]:
    own: list[tuple[Location, object]] = [(("target", "python"), target), (("responder", "python"), player)]
    for where, part in own:
        function: Function | None = getattr(part, "function", None)
        if function is not None:
            yield _Asking(where, function, function.lacking, lambda name: [name], None)
    for number, (place, grader) in enumerate(zip(grader_places(found.spec), graders, strict=True)):
        if place.block.type == "python":
            from holdfast.graders.python import PythonCheck

            assert isinstance(grader, PythonCheck)
            yield _Asking((*place.where, "function"), grader.function, grader.lacking, grader.sought, number)


def _lacks(survey: Survey, asking: _Asking) -> Iterator[tuple[str, str]]:
    """Each parameter that rows have no value for, and which rows those are, in words."""
    seen = [
        (fields, where)
        for (fields, panel), where in survey.shapes.items()
        if asking.grader is None or asking.grader in panel.graders
    ]
    rows: dict[str, list[tuple[tuple[str, ...], str]]] = {}
    for fields, where in seen:
        for name in asking.lacking(fields):
            rows.setdefault(name, []).append((fields, where))
    for name, lack in rows.items():
        sought = " or ".join(asking.sought(name))
        if len(lack) == len(seen):
            known = ", ".join(sorted({field for fields, _ in seen for field in fields}))
            yield name, f"asks for {name}; no sample has a field {sought}; they have: {known}"
        else:
            fields, where = lack[0]
            yield name, f"asks for {name}; {where}: no field {sought} in this row; it has: {', '.join(sorted(fields))}"
