"""Between the engine and the grader of a plug-in: whatever it returns or raises, a run goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec.structs import replace

from holdfast.errors import AttemptError
from holdfast.functions import user_errors
from holdfast.graders.types import Grader, InstantGrader, SetVerdict, Verdict, WaitingGrader, check_score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin


def guarded(grader: Any, origin: Origin) -> InstantGrader | WaitingGrader:
    """Return a grader that checks the verdicts of another one, and turns its exceptions into errors of a grade."""
    return _GuardedInstant(grader, origin) if hasattr(grader, "check") else _GuardedWaiting(grader, origin)


class _Guarded(Grader):
    """A grader of a plug-in."""

    def __init__(self, grader: Any, origin: Origin) -> None:
        super().__init__(grader.block, origin)
        self._grader = grader

    async def __aenter__(self) -> Self:
        await self._grader.__aenter__()
        self.looks_at_all = self._grader.looks_at_all
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._grader.__aexit__(*details)


class _GuardedInstant(_Guarded, InstantGrader):
    """Guards a grader that answers at once."""

    def check(self, case: Case) -> Verdict:
        """Return the grader's verdict after checking it."""
        with user_errors("grader", retry=False):
            returned = self._grader.check(case)
        return _check(returned, self._grader)


class _GuardedWaiting(_Guarded, WaitingGrader):
    """Guards a grader that waits."""

    async def judge(self, case: Case) -> Verdict:
        """Return the grader's verdict after checking it."""
        with user_errors("grader", retry=False):
            returned = await self._grader.judge(case)
        return _check(returned, self._grader)

    async def judge_all(self, cases: Sequence[Case]) -> SetVerdict:
        """Return the grader's verdicts after checking that there is one for each output."""
        with user_errors("grader", retry=False):
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
