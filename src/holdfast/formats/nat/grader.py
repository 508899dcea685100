"""An evaluator of NeMo Agent Toolkit as a grader, run in this process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

from holdfast.errors import AttemptError, Fault, HoldfastError, Problem
from holdfast.formats.nat.config import evaluator_part, identity_of, read_config
from holdfast.formats.nat.library import Evaluator, load_evaluator_config
from holdfast.formats.nat.schema import NatGrader
from holdfast.formats.nat.trace import steps_of
from holdfast.functions import describe_error
from holdfast.graders.expected import render_text
from holdfast.graders.types import Verdict, WaitingGrader
from holdfast.spec.validation import suggest

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.graders.types import Case
    from holdfast.spec.document import Document, Location
    from holdfast.spec.origin import Origin

_FAILED = ("Error in evaluator", "Evaluator error")
"""beginnings of a reasoning by which NAT's evaluators report an error instead of a score"""


class NatEvaluator(WaitingGrader):
    """Builds the evaluator once per process and asks it about each output."""

    schema = NatGrader
    default_threshold = 0.5
    extra = "nat"
    block: NatGrader

    def __init__(self, block: NatGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        assert block.evaluator is not None
        path = None if block.config_file is None else origin.folder / block.config_file
        self._evaluator = Evaluator(load_evaluator_config(path, block.evaluator, block.override, origin.where()))

    @classmethod
    def resolve(
        cls, block: NatGrader, document: Document, location: Location, folder: Path, problems: list[Problem]
    ) -> NatGrader:
        """Default to the target's configuration, and to the evaluator of the grader's name."""
        target = document.data.get("target")
        update: dict[str, Any] = {} if block.evaluator is not None else {"evaluator": block.name}
        if block.config_file is None and isinstance(target, dict) and isinstance(target.get("nat"), str):
            update |= {"config_file": target["nat"], "override": {**(target.get("override") or {}), **block.override}}
        elif block.config_file is None and not isinstance(block.evaluator, dict):
            message = "needs a `config_file` that has the evaluator, or the evaluator's own block"
            problems.append(Problem(document.where(location), message))
        return block.model_copy(update=update)

    @classmethod
    def identity(cls, block: NatGrader, origin: Origin) -> dict[str, Any]:
        """Return the part of the configuration that the evaluator uses, and the code of its components."""
        identity = {key: value for key, value in block.identity().items() if key not in ("config_file", "override")}
        config = {} if block.config_file is None else read_config(origin.folder / block.config_file, block.override)
        evaluator = block.evaluator
        if isinstance(evaluator, str):
            section = config.get("eval")
            evaluators = section.get("evaluators") if isinstance(section, dict) else None
            evaluators = evaluators if isinstance(evaluators, dict) else {}
            if evaluator not in evaluators:
                hint = suggest(evaluator, evaluators)
                raise origin.error(f"{block.config_file} has no evaluator {evaluator!r}{hint}")
            evaluator = evaluators[evaluator]
        assert evaluator is not None
        part = {"evaluator": evaluator, **evaluator_part(config, evaluator)}
        return {**identity, "evaluator": None, **identity_of(part, origin.folder)}

    async def __aenter__(self) -> Self:
        try:
            await self._evaluator.open()
        except HoldfastError:
            raise
        except Exception as error:  # raised by a component
            message = f"the evaluator {self.block.name} cannot be built: {describe_error(error)}"
            raise Fault("rejected", message, remedy="Fix it, then run the same command again.") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._evaluator.close()

    async def judge(self, case: Case) -> Verdict:
        """Return the evaluator's score as a verdict. What it reports as an error is an error, whatever the score."""
        fields, output = case.sample.fields, case.output
        try:
            value, reasoning, error = await self._evaluator.evaluate(
                case.sample.id,
                self._question(case),
                self._expected(fields),
                output.output,
                steps_of(output),
                fields.get("expected_intermediate_steps") or [],
                dict(fields),
            )
        except HoldfastError:
            raise
        except Exception as raised:  # raised by the evaluator: an error grade, never a score
            raise _failed(describe_error(raised)) from raised
        if message := error or _error_in(reasoning):
            raise _failed(message)
        return self._verdict(value, reasoning)

    def _question(self, case: Case) -> Any:
        if self.block.question is not None:
            return render_text(self.block.question, case.sample.fields)
        return case.output.prompt or ""

    def _expected(self, fields: dict[str, Any]) -> Any:
        if self.block.expected is not None:
            return render_text(self.block.expected, fields)
        return fields.get("expected", fields.get("answer"))

    def _verdict(self, value: Any, reasoning: Any) -> Verdict:
        number = float(value) if isinstance(value, bool | int | float) else math.nan
        if math.isnan(number):
            raise _failed(f"the evaluator's score is not a number: {value!r}")
        details = {"value": number, "reasoning": reasoning}
        feedback = reasoning if isinstance(reasoning, str) else ""
        if self.block.measure:
            return Verdict(None, feedback, details)
        low, high = self.block.range or (0.0, 1.0)
        if not low <= number <= high:
            raise _failed(
                f"the evaluator's score {number:g} is not between {low:g} and {high:g}",
                remedy="Give the grader its `range: [lowest, highest]`, or `measure: true` if it is not a score.",
            )
        return Verdict((number - low) / (high - low), feedback, details)


def _error_in(reasoning: Any) -> str | None:
    """Return the error in a reasoning: some of NAT's evaluators report errors only there."""
    if isinstance(reasoning, str):
        return reasoning if reasoning.startswith(_FAILED) else None
    if not isinstance(reasoning, dict):
        return None
    for key in ("error", "error_type"):
        if reasoning.get(key):
            return str(reasoning[key])
    return _error_in(reasoning.get("reasoning"))


def _failed(message: str, remedy: str | None = None) -> AttemptError:
    return AttemptError("grader", message, remedy=remedy, retry=False)
