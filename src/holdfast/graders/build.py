"""The graders of an eval: where they stand, what identifies them, and how they are built."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import msgspec

from holdfast.errors import AttemptError
from holdfast.graders.votes import Votes
from holdfast.spec.eval import Origin
from holdfast.spec.grader_schema import is_judge
from holdfast.spec.load_graders import GRADERS
from holdfast.spec.named_inputs import named_inputs, with_named_inputs
from holdfast.spec.template import RENDER_ERRORS, expression, normal_expression, normal_form

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.graders.types import Grader, InstantGrader, WaitingGrader
    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval
    from holdfast.spec.grader_schema import Combine, GraderBlock


class GraderPlace(msgspec.Struct, frozen=True):
    """A grader of an eval: after a turn, or at the end."""

    name: str
    """as metrics have it: `checkpoint@2/name` after a turn"""
    block: GraderBlock
    turn: int | None
    stops: bool
    where: Location
    """in the eval file"""
    votes: tuple[int, ...] = ()
    """numbers of the graders whose verdicts it combines, instead of giving one of its own"""

    @property
    def combine(self) -> Combine:
        """How it combines the verdicts of others."""
        return self.block.combine if is_judge(self.block) else "mean"


def place_name(grader: str, turn: int | None) -> str:
    """Name a grader as metrics do, by where it stands."""
    return grader if turn is None else f"checkpoint@{turn}/{grader}"


def grader_places(spec: Eval) -> list[GraderPlace]:
    """List all graders in the order in which they are asked: checkpoints' by turn, then those at the end."""
    places: list[GraderPlace] = []
    for number, checkpoint in enumerate(spec.checkpoints):
        for inner, block in enumerate(checkpoint.graders):
            where = ("checkpoints", number, "graders", inner)
            places += _expand(block, checkpoint.after_turn, checkpoint.stops, where, len(places))
    for number, block in enumerate(spec.graders):
        places += _expand(block, None, False, ("graders", number), len(places))
    return places


def _expand(block: GraderBlock, turn: int | None, stops: bool, where: Location, start: int) -> Iterator[GraderPlace]:
    """Yield the places of a grader: of each vote, where it combines several, then its own."""
    *votes, whole = block.expanded()
    for vote in votes:
        yield GraderPlace(place_name(vote.name, turn), vote, turn, False, where)
    numbers = tuple(range(start, start + len(votes)))
    yield GraderPlace(place_name(whole.name, turn), whole, turn, stops, where, numbers)


def grader_class(block: GraderBlock) -> type[Grader]:
    """Return the class of a block's kind."""
    return cast("type[Grader]", GRADERS.load(block.type))


def grader_identity(place: GraderPlace, spec: Eval) -> dict[str, Any]:
    """Return everything of a grader that can change its verdict."""
    kind = grader_class(place.block)
    identity = kind.identity(place.block, Origin(spec, place.where))
    identity |= {name: normal_form(identity[name]) for name in place.block.templates if name in identity}
    expressions = ("where", *place.block.expressions)
    identity |= {name: normal_expression(identity[name]) for name in expressions if name in identity}
    if kind.revision:
        identity = {**identity, "revision": kind.revision}
    if not GRADERS.is_builtin(place.block.type):
        from holdfast.functions.loading import module_source

        identity = {**identity, "source": module_source(kind.__module__, spec.folder)}
    runs_code = place.block.runs_code or not GRADERS.is_builtin(place.block.type)
    return with_named_inputs(identity, named_inputs(spec, place.block.name, runs_code=runs_code))


def threshold(block: GraderBlock) -> float | None:
    """Return the score from which an output passes; None where the grader itself decides."""
    return grader_class(block).threshold(block) if block.threshold is None else block.threshold


def refuse_unsure(block: GraderBlock, fields: Mapping[str, Any]) -> None:
    """Raise AttemptError where a grader's `where` does not say whether it looks at the outputs of a row."""
    try:
        expression(block.where or "")(fields)
    except RENDER_ERRORS as error:
        raise AttemptError("grader", f"`where` cannot be evaluated for this row: {error}", retry=False) from error


def build_graders(spec: Eval) -> list[InstantGrader | WaitingGrader]:
    """Build all graders of an eval, ready to be opened."""
    return [
        Votes(place.block, Origin(spec, place.where)) if place.votes else _build(place.block, Origin(spec, place.where))
        for place in grader_places(spec)
    ]


def _build(block: GraderBlock, origin: Origin) -> InstantGrader | WaitingGrader:
    kind = grader_class(block)
    if kind.requires is not None:
        module, package = kind.requires
        if find_spec(module) is None:
            raise origin.error(f"needs the package {package}", f"pip install {package}")
    grader = cast("InstantGrader | WaitingGrader", kind(block, origin))
    if GRADERS.is_builtin(block.type):
        return grader
    from holdfast.graders.guard import GuardedInstant, GuardedWaiting

    return GuardedInstant(grader, origin) if hasattr(grader, "check") else GuardedWaiting(grader, origin)
