"""Grades with a user's function."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import msgspec

from holdfast.errors import AttemptError
from holdfast.functions import Function, function_source, load_function, user_errors
from holdfast.graders.expected import expected_value, render_text
from holdfast.graders.types import Verdict, WaitingGrader, check_score
from holdfast.spec.grader_schema import GraderBlock
from holdfast.spec.schema import FunctionName
from holdfast.spec.template import is_template, texts

if TYPE_CHECKING:
    from collections.abc import Collection

    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin

OFFERED: Final = ("output", "sample", "messages", "expected", "solution_str", "ground_truth", "extra_info", "metadata")
"""parameters that every function may have; `expected` and `ground_truth` only if the row has such a value"""

EXPECTED: Final = ("expected", "answer", "ground_truth", "target", "ideal")
"""fields of a row that may hold the expected value, in search order; for a parameter with one of these names, the field
of its own name comes first"""


class PythonGrader(GraderBlock):
    """Calls a Python function with the values that its parameters name."""

    type: Literal["python"]
    function: FunctionName
    """Function to call, as `file.py:function` relative to the eval file, or as `package.module:function`."""
    expected: str | int | float | bool | None = None
    """Template of the expected value. Default: the row's field with the parameter's name, else its first field among
    `expected`, `answer`, `ground_truth`, `target` and `ideal`."""
    transcript: Literal["last", "all", "reasoning"] = "last"
    """Replies that `output` holds: the `last` one, or `all` so far, joined by blank lines. With `reasoning` it is the
    last reply, and `messages` have the model's `reasoning`."""
    params: dict[str, Any] = {}
    """Further keyword arguments. Texts in them are templates over the row, and a text that is a single
    `{{ expression }}` keeps the type of its value."""
    version: str | None = None
    """Change this when the function grades differently for a reason that its source does not show."""

    templates: ClassVar[tuple[str, ...]] = ("expected", "params")
    runs_code: ClassVar[bool] = True


class PythonCheck(WaitingGrader):
    """Calls a user's function with the values that its parameters name."""

    schema = PythonGrader
    default_threshold = 0.5
    block: PythonGrader

    def __init__(self, block: PythonGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        where = origin.where()
        function = load_function(block.function, origin.folder, where, origin.spec.functions)
        self.function = Function(function, (*OFFERED, *block.params), where, takes_fields=True)
        self._threshold = 0.5 if block.threshold is None else block.threshold
        self._fixed_params = not any(map(is_template, texts(block.params)))

    @classmethod
    def identity(cls, block: PythonGrader, origin: Origin) -> dict[str, Any]:
        """Add the function's code."""
        name, source = function_source(block.function, origin.folder, origin.where(), origin.spec.functions)
        return {**block.identity(), "function": name, "source": source}

    def lacking(self, fields: Collection[str]) -> list[str]:
        """Return the parameters for which a row with these fields has no value."""
        return [name for name in self.function.required if not self._has(name, fields)]

    def _has(self, name: str, fields: Collection[str]) -> bool:
        if name in self.block.params:
            return True
        if name in EXPECTED:
            return self.block.expected is not None or any(field in fields for field in self.sought(name))
        return name in OFFERED or name in fields

    @staticmethod
    def sought(name: str) -> list[str]:
        """Return the fields of a row that may hold the value of a parameter, in search order."""
        return list(dict.fromkeys([name, *EXPECTED])) if name in EXPECTED else [name]

    async def judge(self, case: Case) -> Verdict:
        """Call the function and return its result as a verdict."""
        fields = dict(case.sample.fields)
        if lacking := self.lacking(fields):
            message = f"{self.function} asks for {', '.join(lacking)}, which this row does not have"
            raise AttemptError("grader", message, retry=False)
        with user_errors("grader", retry=False, passed=(AttemptError,)):  # an error grade, never a score
            returned = await self.function(self._offered(case, fields))
        verdict = as_verdict(returned, self._threshold)
        try:
            msgspec.json.encode(verdict)
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong(f"the return value cannot be serialized as JSON: {error}") from error
        return verdict

    def _offered(self, case: Case, fields: dict[str, Any]) -> dict[str, Any]:
        text = case.text(self.block)
        messages = case.messages_with_reasoning if self.block.transcript == "reasoning" else case.messages
        offered = {
            "output": text,
            "sample": fields,
            "messages": [dict(message) for message in messages],
            "solution_str": text,
            "extra_info": fields,
        }
        if "metadata" in self.function.names:  # but not for **kwargs, which contain the row already
            offered["metadata"] = fields
        for name in ("expected", "ground_truth", *self.function.fields):
            if name in EXPECTED and self.block.expected is not None:
                offered[name] = render_text(self.block.expected, fields)
            elif holders := [field for field in self.sought(name) if field in fields]:
                offered[name] = fields[holders[0]]
        params = self.block.params
        return {**offered, **(params if self._fixed_params else expected_value(params, fields))}


def as_verdict(returned: Any, threshold: float) -> Verdict:
    """Return a bool, a number, a dict or a Verdict as a Verdict."""
    if returned is None:
        raise _wrong("the function returned None; expected a bool, a number or a Verdict")
    if isinstance(returned, Verdict):
        score = check_score(returned.score)
        _agree(score, returned.passed, threshold)
        return Verdict(score, str(returned.feedback), returned.details, returned.usage)
    if isinstance(returned, dict):
        keys = {"score", "passed", "feedback", "reason", "details"}
        rest = {key: value for key, value in returned.items() if key not in keys}
        if "score" in returned:
            score = check_score(returned["score"])
            _agree(score, returned.get("passed"), threshold)
        elif "passed" in returned:
            score = float(_check_passed(returned["passed"]))
        else:
            names = ", ".join(map(repr, returned)) or "no keys"
            raise _wrong(
                f"the function returned a dict with neither `score` nor `passed`, but {names}; to skip an output, "
                'return {"score": None}'
            )
        return Verdict(
            score,
            str(returned.get("feedback") or returned.get("reason") or ""),
            returned.get("details", rest or None),
        )
    return Verdict(check_score(returned))


def _agree(score: float | None, passed: Any, threshold: float) -> None:
    """Refuse a verdict that contradicts itself: the score decides if an output passes."""
    if passed is None:
        return
    if score is None or _check_passed(passed) != (score >= threshold):
        raise _wrong(
            f"the function returned passed={bool(passed)} with a score of {score}, and the grader's threshold is "
            f"{threshold:g}: return one of the two, or set the threshold"
        )


def _check_passed(value: Any) -> bool:
    number = math.nan if isinstance(value, str | bytes) else value  # a bool of another library counts too
    try:
        if number in (0, 1):
            return bool(number)
    except ValueError:  # of an array
        pass
    raise _wrong(f"`passed` must be true or false, not {value!r}")


def _wrong(message: str) -> AttemptError:
    return AttemptError("grader", message, retry=False)
