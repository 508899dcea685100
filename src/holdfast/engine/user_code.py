"""Check users' code: rows have the values that functions ask for, and code that no key covers is reported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

import msgspec

from holdfast.errors import ConfigError, Problem
from holdfast.graders.build import grader_places
from holdfast.spec.eval import is_named
from holdfast.spec.fingerprint import computed_imports, is_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from holdfast.conversation.simulated_user import Player
    from holdfast.data.survey import Survey
    from holdfast.functions import Function
    from holdfast.graders.python import PythonCheck
    from holdfast.graders.types import InstantGrader, WaitingGrader
    from holdfast.plan.identity import RunIdentity
    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval
    from holdfast.targets.types import Target


class _PlacedFunction(msgspec.Struct, frozen=True):
    """A function and its place in the eval."""

    where: Location
    function: Function
    lacking: Callable[[Collection[str]], list[str]]
    """the parameters that a row with these fields has no value for"""
    fields_for: Callable[[str], Sequence[str]]
    """the fields that may hold the value of a parameter"""
    grader: int | None
    """its number, if it is a grader, which may not grade all rows"""


def check_parameters(
    identity: RunIdentity,
    target: Target | None,
    player: Player | None,
    graders: Sequence[InstantGrader | WaitingGrader],
) -> None:
    """Raise ConfigError if a function of the eval asks for a value that a row does not have."""
    problems: list[Problem] = []
    remedy = ""
    for placed in _functions(identity, target, player, graders):
        for name, message in _missing_values(identity.survey, placed):
            problems.append(Problem(identity.spec.document.where(placed.where), f"{placed.function} {message}"))
            is_expected = len(placed.fields_for(name)) > 1
            other = 'say where the value is: expected: "{{ FIELD }}"' if is_expected else "give the parameter a default"
            offered = ", ".join(placed.function.offered)
            remedy = f"Add the field to the rows, or {other}. Besides fields, a function may ask for {offered}."
    if problems:
        raise ConfigError(problems, remedy=remedy)


def _functions(
    identity: RunIdentity,
    target: Target | None,
    player: Player | None,
    graders: Sequence[InstantGrader | WaitingGrader],
) -> Iterator[_PlacedFunction]:
    parts: list[tuple[Location, object]] = [(("target", "python"), target), (("responder", "python"), player)]
    for where, part in parts:
        function: Function | None = getattr(part, "function", None)
        if function is not None:
            yield _PlacedFunction(where, function, function.lacking, lambda name: [name], None)
    for number, (place, grader) in enumerate(zip(grader_places(identity.spec), graders, strict=True)):
        if place.block.type == "python":
            check = cast("PythonCheck", grader)
            yield _PlacedFunction((*place.where, "function"), check.function, check.lacking, check.sought, number)


def _missing_values(survey: Survey, placed: _PlacedFunction) -> Iterator[tuple[str, str]]:
    """Yield each parameter without a value in some rows, with a message that names them."""
    shapes = [
        (fields, where)
        for (fields, panel), where in survey.shapes.items()
        if placed.grader is None or placed.grader in panel.graders
    ]
    rows: dict[str, list[tuple[tuple[str, ...], str]]] = {}
    for fields, where in shapes:
        for name in placed.lacking(fields):
            rows.setdefault(name, []).append((fields, where))
    for name, lack in rows.items():
        fields_text = " or ".join(placed.fields_for(name))
        if len(lack) == len(shapes):
            present = ", ".join(sorted({field for fields, _ in shapes for field in fields}))
            yield name, f"asks for {name}; no sample has a field {fields_text}; they have: {present}"
        else:
            fields, where = lack[0]
            yield (
                name,
                f"asks for {name}; {where}: no field {fields_text} in this row; it has: {', '.join(sorted(fields))}",
            )


def unseen_code(spec: Eval) -> Iterator[str]:
    """Describe each program that is not completely covered by the key."""
    for location, command in _commands(spec):
        for place in dict.fromkeys(computed_imports(spec.folder, command)):
            yield (
                f"{spec.document.where(location)}: {place} changes sys.path, or imports modules by names that it "
                "computes: modules found only that way are not part of the key. After a change of one, use --fresh."
            )
    for number, hook in enumerate(() if spec.hooks is None else spec.hooks.before_task):
        for word in hook.arguments:
            path = os.path.normpath(f"{hook.working_directory}/{word}")
            if is_file(spec.folder / path) and not is_named(spec, path):
                yield (
                    f"{spec.document.where(('hooks', 'before_task', number))}: {word} is part of no key. If answers "
                    f'depend on it, write `files: {{target: [{path}]}}`, otherwise `files: ["!{path}"]`.'
                )


def _commands(spec: Eval) -> Iterator[tuple[Location, Sequence[str]]]:
    if spec.target.command_line:
        yield ("target", "command"), spec.target.command_line
    for number, tool in enumerate(getattr(spec.target, "tools", ())):
        if tool.mcp is not None:
            yield ("target", "tools", number, "mcp", "command"), tool.mcp.command
    for location, grader in spec.placed_graders():
        if grader.program:
            yield (*location, "command"), grader.program
