"""NeMo Agent Toolkit in an eval: a workflow as the target, and an evaluator as a grader, run in this process.

An evaluator that is known to work row by row judges each output as soon as it is there. Any other evaluator gets all
outputs of the run at once, as under `nat eval`.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec import UNSET, UnsetType

from holdfast import AttemptError, HoldfastError, Problem, Reply, SetVerdict, Target, Verdict, WaitingGrader
from holdfast.errors import suggest
from holdfast.functions import describe_error
from holdfast.plugins.nat.config import evaluator_part, identity_of, read_config, workflow_part
from holdfast.plugins.nat.dataset import KEYED
from holdfast.plugins.nat.library import Evaluator, Item, Workflow, load_evaluator_config, load_workflow_config
from holdfast.plugins.nat.schema import NatGrader, NatTarget
from holdfast.plugins.nat.steps import ENDS, messages_of, nat_steps, usage_of
from holdfast.spec.template import RENDER_ERRORS, template

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from holdfast import Case, Document, Origin, Turn
    from holdfast.plugins.nat.library import Evaluation
    from holdfast.spec.document import Location

_FAILED = ("Error in evaluator", "Evaluator error")
"""beginnings of a reasoning by which NAT's evaluators report an error instead of a score"""


class NatEvaluator(WaitingGrader):
    """Builds the evaluator once per process."""

    schema = NatGrader
    default_threshold = 0.5
    extra = "nat"
    one_scale = True
    block: NatGrader

    def __init__(self, block: NatGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        assert block.evaluator is not None
        path = None if block.config_file is None else origin.folder / block.config_file
        config = load_evaluator_config(path, block.evaluator, block.override, origin.where())
        self._evaluator = Evaluator(config, block.name, block.dataset, origin.spec)
        self._spec = origin.spec

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
        if block.dataset is not None:
            identity["dataset"] = {key: block.dataset[key] for key in KEYED if key in block.dataset}
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

    @classmethod
    def totals(cls, block: NatGrader, counts: Sequence[int]) -> dict[str, float]:
        """Count the values that are measurements because they are not scores."""
        return {"measured": counts[0]}

    async def __aenter__(self) -> Self:
        await self._evaluator.open()
        self.looks_at_all = self._evaluator.looks_at_all
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._evaluator.close()

    async def judge(self, case: Case) -> Verdict:
        """Return the evaluator's score as a verdict. A reported error is an error, whatever the score."""
        if self.looks_at_all:
            raise _failed("the evaluator looks at all outputs together, and cannot judge one after a turn")
        try:
            judged = await self._evaluator.evaluate(self._item(case))
        except HoldfastError:
            raise
        except Exception as raised:  # raised by the evaluator: an error grade, never a score
            raise _failed(describe_error(raised)) from raised
        return self._verdict(judged)

    async def judge_all(self, cases: Sequence[Case]) -> SetVerdict:
        """Return the evaluator's scores, and its own average."""
        try:
            judged, average, more = await self._evaluator.evaluate_all([self._item(case) for case in cases])
        except HoldfastError:
            raise
        except Exception as raised:
            raise _failed(describe_error(raised)) from raised
        verdicts: list[Verdict | AttemptError] = []
        for each in judged:
            try:
                verdicts.append(self._verdict(each))
            except AttemptError as error:
                verdicts.append(error)
        return SetVerdict(verdicts, average, more or None)

    def _item(self, case: Case) -> Item:
        """Return an output as the evaluator gets it."""
        fields, output = case.sample.fields, case.output
        item = None if (rows := self._evaluator.rows) is None else rows.item(case.sample.where)
        if item is None:
            item = Item(
                id=case.sample.id,
                question=self._question(case),
                expected=self._expected(fields),
                expected_trace=fields.get("expected_intermediate_steps") or [],
                row=dict(fields),
            )
        return item._replace(
            id=item.id if self._spec.trials == 1 else f"{item.id}_rep{output.trial - 1}",
            output=output.output if output.value is UNSET else output.value,
            trace=nat_steps(output, (), None, ENDS) if isinstance(output.trace, UnsetType) else output.trace,
        )

    def _question(self, case: Case) -> Any:
        if self.block.question is not None:
            return _fill_in(self.block.question, case.sample.fields)
        return case.output.prompt or ""

    def _expected(self, fields: dict[str, Any]) -> Any:
        if self.block.expected is not None:
            return _fill_in(self.block.expected, fields)
        expected = fields.get("expected", fields.get("answer"))
        return "" if expected is None else expected

    def _verdict(self, judged: Evaluation) -> Verdict:
        """Return the verdict for a value: a score, or a measurement."""
        value, reasoning = judged.score, judged.reasoning
        if message := judged.error or _error_in(reasoning):
            raise _failed(message)
        number = value if isinstance(value, bool | int | float) else None
        if number is not None and math.isnan(number):
            raise _failed("the evaluator's score is not a number (NaN)")
        details = {"value": value, "reasoning": reasoning, **({"more": judged.more} if judged.more else {})}
        feedback = reasoning if isinstance(reasoning, str) else ""
        if self.block.measure:
            return Verdict(None, feedback, details)
        if value is None:
            return Verdict(None, feedback or "the evaluator gave no score", details)
        low, high = self.block.range or (0.0, 1.0)
        if number is not None and low <= number <= high:
            return Verdict((number - low) / (high - low), feedback, details)
        if self.block.range is not None or self.block.measure is False:
            remedy = "correct its `range`" if self.block.range else "give the grader its `range: [lowest, highest]`"
            raise _failed(f"the evaluator's score {value!r} is not between {low:g} and {high:g}: {remedy}")
        return Verdict(None, feedback, details, counts=(1,))


def _fill_in(value: Any, fields: dict[str, Any]) -> Any:
    """Fill in a template; a single expression keeps its type."""
    if not isinstance(value, str):
        return value
    try:
        return template(value).value(fields)
    except RENDER_ERRORS as error:
        raise _failed(f"cannot render {value!r}: {error}") from error


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


def _failed(message: str) -> AttemptError:
    return AttemptError("grader", message, retry=False)


class NatWorkflow(Target):
    """Builds the workflow once per process and runs it for each turn."""

    schema = NatTarget
    extra = "nat"

    def __init__(self, block: NatTarget, origin: Origin) -> None:
        super().__init__(block, origin)
        config = load_workflow_config(origin.folder / block.nat, block.override, origin.where("nat"))
        self._workflow = Workflow(config, block.nat, block.result_json_path, origin.where("result_json_path"))
        self.notices = self._workflow.notices

    @classmethod
    def identity(cls, block: NatTarget, origin: Origin) -> dict[str, Any]:
        """Return the part of the configuration that the workflow uses, and the code of its components."""
        part = workflow_part(read_config(origin.folder / block.nat, block.override))
        identity = {**identity_of(part, origin.folder), "version": block.version}
        path = block.result_json_path
        return identity if path == "$" else {**identity, "result_json_path": path}

    async def __aenter__(self) -> Self:
        await self._workflow.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._workflow.close()

    async def reply(self, turn: Turn) -> Reply:
        """Run the workflow; its tool calls are in the reply's messages, all its steps in the trace."""
        # In a separate task, since NAT's context variables must not reach the next trial of this worker.
        task = asyncio.create_task(self._workflow.run(turn.messages))
        try:
            answer = await task
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise AttemptError("agent", "the workflow was cancelled from inside") from error
        except Exception as error:  # raised by the workflow: an error of this trial, never of the run
            refused = isinstance(error, TypeError) and len(turn.messages) > 1
            raise AttemptError("agent", describe_error(error), retry=not refused) from error
        text, trace, value = answer
        messages = messages_of(trace, text)
        reply = Reply(text=text, messages=messages, usage=usage_of(trace), trace=trace, value=value)
        return msgspec.json.decode(msgspec.json.encode(reply), type=Reply)
