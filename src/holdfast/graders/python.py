"""A user's function as a grader."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import msgspec

from holdfast.errors import AttemptError
from holdfast.functions import Function, said_with_place
from holdfast.graders.checks import rendered
from holdfast.graders.types import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.graders.types import Case
    from holdfast.spec.grader_fields import PythonGrader

OFFERED = ("output", "sample", "messages", "expected", "solution_str", "ground_truth", "extra_info")


class PythonCheck:
    """Calls the function with what its parameters name."""

    def __init__(self, block: PythonGrader, function: Callable[..., Any], fingerprint: str, where: str) -> None:
        self.block = block
        self.fingerprint = fingerprint
        self._function = Function(function, (*OFFERED, *block.params), where)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def judge(self, case: Case) -> Verdict:
        """What the function returns, as a verdict."""
        fields = dict(case.sample.fields)
        expected = fields.get("expected", fields.get("answer"))
        if self.block.expected is not None:
            expected = rendered(self.block.expected, fields)
        said = case.said(self.block)
        offered = {
            "output": said,
            "sample": fields,
            "messages": [dict(message) for message in case.output.messages],
            "expected": expected,
            "solution_str": said,
            "ground_truth": expected,
            "extra_info": fields,
            **self.block.params,
        }
        try:
            returned = await self._function(offered)
        except AttemptError:
            raise
        except Exception as error:  # the user's own: an error grade, never a score
            raise AttemptError("grader", said_with_place(error), retry=False) from error
        verdict = as_verdict(returned)
        try:
            msgspec.json.encode(verdict)
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong(f"what the function returned cannot be kept as JSON: {error}") from error
        return verdict


def as_verdict(returned: Any) -> Verdict:
    """A bool, a number, a dict or a Verdict, as a Verdict."""
    if returned is None:
        raise _wrong("the function returned None; it returns a bool, a number or a Verdict")
    if isinstance(returned, Verdict):
        if returned.passed is not None:
            raise _wrong("a function gives a score; whether it passes is decided by the grader's threshold")
        return Verdict(_score(returned.score), str(returned.feedback), returned.details, returned.usage)
    if isinstance(returned, dict):
        known = {"score", "passed", "feedback", "reason", "details"}
        rest = {key: value for key, value in returned.items() if key not in known}
        return Verdict(
            _score(returned.get("score", returned.get("passed"))),
            str(returned.get("feedback") or returned.get("reason") or ""),
            returned.get("details", rest or None),
        )
    return Verdict(_score(returned))


def _score(value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= 1:
        raise _wrong(f"a score is a bool or a number from 0 to 1, not {value!r}")
    return number


def _wrong(message: str) -> AttemptError:
    return AttemptError("grader", message, retry=False)
