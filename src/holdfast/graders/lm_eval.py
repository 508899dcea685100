"""Grades with the code of an lm-eval task: its filters and metrics.

For metrics that Holdfast does not compute itself. The code runs in worker processes (`benchmarks/grading.py`).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import Field

from holdfast.errors import AttemptError
from holdfast.graders.pool import NoAnswer, Pool
from holdfast.graders.types import Verdict, WaitingGrader
from holdfast.spec.grader_schema import GraderBlock
from holdfast.spec.plugins import BUILT_IN
from holdfast.spec.schema import Seconds

if TYPE_CHECKING:
    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin


class LmEvalGrader(GraderBlock):
    """Grades with a task of lm-eval: its filters and its metric. Needs rows that were compiled from lm-eval."""

    type: Literal["lm_eval"]
    task: str = Field(min_length=1)
    """Name of the task."""
    metric: str = Field(min_length=1)
    """Name of the metric. A value between 0 and 1 is the score; others are recorded without one."""
    filter: str = "none"
    """Name of the task's filter to apply to the reply."""
    version: str | None = None
    """Version of lm-eval whose task grades; others are refused. Benchmarks set it when they are compiled. Default: the
    installed version."""
    timeout: Seconds = 60
    """Time limit for one reply."""


@dataclass
class _Shared:
    """The processes that a run's lm-eval graders share: tasks may have a dozen metrics, and lm-eval imports slowly."""

    pool: Pool = field(default_factory=lambda: Pool(BUILT_IN["holdfast.grading_processes"]["lm_eval"], size=2))
    users: int = 0


_running: Final[dict[asyncio.AbstractEventLoop, _Shared]] = {}


class LmEval(WaitingGrader):
    """Asks processes that have the task loaded, without its dataset."""

    schema = LmEvalGrader
    requires = ("lm_eval", "lm-eval")
    extra = "lm-eval"
    block: LmEvalGrader

    def __init__(self, block: LmEvalGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        installed = version("lm-eval")
        if block.version not in (None, installed):
            raise origin.error(
                f"grades with lm-eval {block.version}, and {installed} is installed",
                f"pip install lm-eval=={block.version}, or run the eval again to compile it with {installed}.",
            )

    @classmethod
    def identity(cls, block: LmEvalGrader, origin: Origin) -> dict[str, Any]:
        """Add the version of lm-eval, whose tasks and metrics change between versions."""
        identity = block.identity()
        if block.version is None:
            with suppress(PackageNotFoundError):  # grading needs the package, looking at a run does not
                identity["version"] = version("lm-eval")
        return identity

    async def __aenter__(self) -> Self:
        self._shared = _running.setdefault(asyncio.get_running_loop(), _Shared())
        self._shared.users += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._shared.users -= 1
        if not self._shared.users:
            del _running[asyncio.get_running_loop()]
            await self._shared.pool.close()

    async def judge(self, case: Case) -> Verdict:
        """Return the metric in the details, and as the score if it is between 0 and 1."""
        fields = case.sample.fields
        if "doc" not in fields:
            raise AttemptError("grader", "the row has no field `doc`: it was not compiled from lm-eval", retry=False)
        question: dict[str, Any] = {"task": self.block.task, "filter": self.block.filter, "doc": fields["doc"]}
        likelihoods = case.output.messages[-1].get("likelihoods") if case.output.messages else None
        if likelihoods:
            question["responses"] = [[each["logprob"], each["greedy"]] for each in likelihoods]
        else:
            question["responses"] = [case.output.output]
        try:
            answer = await self._shared.pool.ask(question, self.block.timeout)
        except NoAnswer as error:
            raise AttemptError(
                "timeout" if error.late else "grader", f"lm-eval's task {self.block.task}: {error}", retry=False
            ) from None
        if "error" in answer:
            raise AttemptError("grader", f"lm-eval's task {self.block.task}: {answer['error']}", retry=False)
        metrics = answer["metrics"]
        if self.block.metric not in metrics:
            names = ", ".join(metrics)
            raise AttemptError("grader", f"the task has no metric {self.block.metric!r}, but {names}", retry=False)
        value = metrics[self.block.metric]
        is_score = isinstance(value, bool | int | float) and 0 <= value <= 1
        return Verdict(float(value) if is_score else None, "", {"value": value})
