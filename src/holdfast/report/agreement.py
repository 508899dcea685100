"""How far the judges of one grader agree. Pure functions, checked against the definition in the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.store.metrics import Agreement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.report.verdicts import Judged


class AgreementTally:
    """Sums over the outputs of a run, from which Krippendorff's alpha for interval data is computed."""

    def __init__(self) -> None:
        self._outputs = self._equal = self._values = 0
        self._sum = self._squares = self._observed = 0.0

    def add(self, votes: Sequence[Judged | None]) -> None:
        """Add the votes on one output. Outputs with fewer than two scores say nothing."""
        scored = [(vote.status, vote.score) for vote in votes if vote is not None and vote.score is not None]
        if len(scored) < 2:
            return
        scores, count = [score for _, score in scored], len(scored)
        self._outputs += 1
        self._equal += len({status for status, _ in scored}) == 1
        self._values += count
        self._sum += sum(scores)
        self._squares += sum(score * score for score in scores)
        # The sum of (x - y)² over all ordered pairs is 2 (n Σx² - (Σx)²); from differences, it is exact for equal ones.
        self._observed += sum((x - y) ** 2 for x in scores for y in scores) / (count - 1)

    def summary(self) -> Agreement | None:
        """Return the agreement; None where no output has two scores."""
        if not self._outputs:
            return None
        expected = 2 * (self._values * self._squares - self._sum**2) / (self._values - 1)
        # Where all scores are the same, chance would agree as well: alpha is not defined.
        alpha = None if expected <= 1e-12 else 1 - self._observed / expected
        return Agreement(alpha=alpha, equal=self._equal / self._outputs, outputs=self._outputs)
