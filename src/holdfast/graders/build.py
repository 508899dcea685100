"""The graders of an eval: their places, their identities, how they are built, and how slow checks are completed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import msgspec

from holdfast.errors import AttemptError
from holdfast.graders.types import InstantGrader, Verdict, WaitingGrader
from holdfast.spec.eval import Origin, named_inputs, with_named_inputs
from holdfast.spec.grader_schema import is_judge
from holdfast.spec.load_graders import GRADERS
from holdfast.spec.plugins import load_reference
from holdfast.spec.regex import ANSWERS, Slow
from holdfast.spec.template import RENDER_ERRORS, expression, normal_expression, normal_form

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from holdfast.graders.pool import Pool
    from holdfast.graders.types import Grader
    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval
    from holdfast.spec.grader_schema import Combine, GraderBlock
    from holdfast.spec.regex import Request


class GraderPlace(msgspec.Struct, frozen=True):
    """A grader of an eval: after a turn, or at the end."""

    name: str
    """in metrics: `checkpoint@2/name` after a turn"""
    block: GraderBlock
    turn: int | None
    stops: bool
    where: Location
    """in the eval file"""
    votes: tuple[int, ...] = ()
    """numbers of the graders whose verdicts are combined here"""

    @property
    def combine(self) -> Combine:
        """How votes are combined."""
        return self.block.combine if is_judge(self.block) else "mean"


def place_name(grader: str, turn: int | None) -> str:
    """Return a grader's name in metrics, which contains its turn."""
    return grader if turn is None else f"checkpoint@{turn}/{grader}"


def grader_places(spec: Eval) -> list[GraderPlace]:
    """List all graders in the order in which they run: checkpoints by turn, then the graders at the end."""
    places: list[GraderPlace] = []
    for number, checkpoint in enumerate(spec.checkpoints):
        for inner, block in enumerate(checkpoint.graders):
            where = ("checkpoints", number, "graders", inner)
            places += _expand(block, checkpoint.after_turn, checkpoint.stops, where, len(places))
    for number, block in enumerate(spec.graders):
        places += _expand(block, None, False, ("graders", number), len(places))
    return places


def _expand(block: GraderBlock, turn: int | None, stops: bool, where: Location, start: int) -> Iterator[GraderPlace]:
    """Yield the places of a grader: one for each vote that it combines, then its own."""
    *votes, whole = block.expanded()
    for vote in votes:
        yield GraderPlace(place_name(vote.name, turn), vote, turn, False, where)
    numbers = tuple(range(start, start + len(votes)))
    yield GraderPlace(place_name(whole.name, turn), whole, turn, stops, where, numbers)


def grader_class(block: GraderBlock) -> type[Grader]:
    """Return the class of a block's kind."""
    return cast("type[Grader]", GRADERS.load(block.type))


def grader_identity(place: GraderPlace, spec: Eval) -> dict[str, Any]:
    """Return everything that can change a grader's verdict."""
    kind = grader_class(place.block)
    identity = kind.identity(place.block, Origin(spec, place.where))
    for name in place.block.templates:
        if name in identity:
            identity[name] = normal_form(identity[name])
            if identity[name] == type(place.block).model_fields[name].default:
                del identity[name]  # the default, with other spaces inside its braces
    expressions = ("where", *place.block.expressions)
    identity |= {name: normal_expression(identity[name]) for name in expressions if name in identity}
    if kind.revision:
        identity = {**identity, "revision": kind.revision}
    if not GRADERS.is_builtin(place.block.type):
        identity = {
            **identity,
            "source": load_reference("holdfast.functions.loading:module_source")(kind.__module__, spec.folder),
        }
    runs_code = place.block.runs_code or not GRADERS.is_builtin(place.block.type)
    return with_named_inputs(identity, named_inputs(spec, place.block.name, runs_code=runs_code))


def threshold(block: GraderBlock) -> float | None:
    """Return the minimum score to pass; None if the grader decides by other means."""
    return grader_class(block).threshold(block) if block.threshold is None else block.threshold


def refuse_unsure(block: GraderBlock, fields: Mapping[str, Any]) -> None:
    """Raise AttemptError if a grader's `where` cannot be evaluated for a row."""
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


class Votes(WaitingGrader):
    """Holds the place of several judges' combined verdict, which `plan.plan` computes. Nobody asks it."""


def _build(block: GraderBlock, origin: Origin) -> InstantGrader | WaitingGrader:
    kind = grader_class(block)
    if kind.requires is not None:
        module, package = kind.requires
        if find_spec(module) is None:
            raise origin.error(f"needs the package {package}", f"pip install {package}")
    grader = cast("InstantGrader | WaitingGrader", kind(block, origin))
    if GRADERS.is_builtin(block.type):
        return grader
    guarded: InstantGrader | WaitingGrader = load_reference("holdfast.graders.guard:guarded")(grader, origin)
    return guarded


class SlowChecks:
    """Checks whose patterns and comparisons could take forever: processes of a pool do their slow work."""

    def __init__(self) -> None:
        self._pool: Pool | None = None
        """opened by the first check with slow work"""

    async def complete(self, check: Callable[[], Awaitable[Verdict]]) -> Verdict:
        """Call a check again and again, each time with one more answer from the pool, until it returns."""
        answers: dict[Request, Any] = {}
        before = ANSWERS.set(answers)
        try:
            while True:
                try:
                    return await check()
                except Slow as slow:
                    answers[slow.request] = await self._open_pool().do(slow.request)
        finally:
            ANSWERS.reset(before)

    async def close(self) -> None:
        """Stop the processes."""
        if self._pool is not None:
            await self._pool.close()

    def _open_pool(self) -> Pool:
        if self._pool is None:
            self._pool = load_reference("holdfast.graders.pool:Pool")()
        return self._pool
