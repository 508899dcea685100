"""The graders of an eval: their places, their identities, and how they are built."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec
from msgspec.structs import replace

from holdfast.errors import AttemptError, Fault
from holdfast.functions import user_error
from holdfast.functions.loading import module_source
from holdfast.graders.types import Grader, InstantGrader, SetVerdict, Verdict, WaitingGrader, check_score
from holdfast.spec.eval import Origin, named_inputs, with_named_inputs
from holdfast.spec.grader_schema import is_judge
from holdfast.spec.load_graders import GRADERS
from holdfast.spec.template import RENDER_ERRORS, expression, normal_expression, normal_form

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.graders.types import Case
    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval
    from holdfast.spec.grader_schema import Combine, GraderBlock


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
        identity = {**identity, "source": module_source(kind.__module__, spec.folder)}
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
    return GuardedInstant(grader, origin) if hasattr(grader, "check") else GuardedWaiting(grader, origin)


class _Guarded(Grader):
    """A grader of a plug-in: whatever it returns or raises, the run goes on."""

    def __init__(self, grader: Any, origin: Origin) -> None:
        super().__init__(grader.block, origin)
        self._grader = grader

    async def __aenter__(self) -> Self:
        await self._grader.__aenter__()
        self.looks_at_all = self._grader.looks_at_all
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._grader.__aexit__(*details)


class GuardedInstant(_Guarded, InstantGrader):
    """Guards a grader that answers at once."""

    def check(self, case: Case) -> Verdict:
        """Return the grader's verdict after checking it."""
        with _own_errors():
            returned = self._grader.check(case)
        return _check(returned, self._grader)


class GuardedWaiting(_Guarded, WaitingGrader):
    """Guards a grader that waits."""

    async def judge(self, case: Case) -> Verdict:
        """Return the grader's verdict after checking it."""
        with _own_errors():
            returned = await self._grader.judge(case)
        return _check(returned, self._grader)

    async def judge_all(self, cases: Sequence[Case]) -> SetVerdict:
        """Return the grader's verdicts after checking that there is one for each output."""
        with _own_errors():
            returned = await self._grader.judge_all(cases)
        if not isinstance(returned, SetVerdict) or len(returned.verdicts) != len(cases):
            raise _wrong(f"did not return a holdfast.SetVerdict with {len(cases)} verdicts", self._grader)
        _check_json(returned.score, self._grader)
        _check_json(returned.details, self._grader)
        return replace(returned, verdicts=[self._check_one(verdict) for verdict in returned.verdicts])

    def _check_one(self, verdict: Any) -> Verdict | AttemptError:
        try:
            return verdict if isinstance(verdict, AttemptError) else _check(verdict, self._grader)
        except AttemptError as error:
            return error


@contextmanager
def _own_errors() -> Iterator[None]:
    """Turn the plug-in's exceptions into error grades that name the line that raised them."""
    try:
        yield
    except (AttemptError, Fault):
        raise
    except Exception as error:
        raise user_error("grader", error, retry=False) from error


def _check(returned: Any, grader: Grader) -> Verdict:
    if not isinstance(returned, Verdict):
        raise _wrong(f"returned {type(returned).__name__}, not a holdfast.Verdict", grader)
    verdict = replace(returned, score=check_score(returned.score))
    threshold = grader.threshold(grader.block) if grader.block.threshold is None else grader.block.threshold
    if verdict.score is not None and verdict.passed is None and threshold is None:
        raise _wrong("has no threshold, and its verdict does not set `passed`", grader)
    _check_json(verdict, grader)
    return verdict


def _check_json(value: Any, grader: Grader) -> None:
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(f"returned a value that cannot be serialized as JSON: {error}", grader) from error


def _wrong(message: str, grader: Grader) -> AttemptError:
    return AttemptError("grader", f"the grader {grader.block.type!r} {message}", retry=False)
