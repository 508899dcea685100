"""Several judges on one output: their votes as one verdict.

Each vote is a grade of its own. The combined verdict is computed wherever votes are read, and stored nowhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.store.heads import VerdictRef
from holdfast.store.records import apply_threshold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.spec.grader_schema import Combine


def combine_votes(votes: Sequence[VerdictRef | None], combine: Combine, threshold: float | None) -> VerdictRef | None:
    """Return the verdict of several judges; None while a vote is missing.

    The verdict has no usage of its own: the votes' usage is counted separately.
    """
    recorded = [vote for vote in votes if vote is not None]
    if len(recorded) < len(votes):
        return None
    last = max(vote.time for vote in recorded)
    if any(vote.status == "error" for vote in recorded):
        return VerdictRef("error", None, None, last)
    scores = [vote.score for vote in recorded if vote.score is not None]
    if not scores:
        return VerdictRef("skipped", None, None, last)
    score = combine_scores(scores, combine, threshold)
    status = apply_threshold(threshold, "passed", score)
    return VerdictRef(status, score, None, last)


def combine_scores(scores: Sequence[float], combine: Combine, threshold: float | None) -> float:
    """Combine several scores. With `majority` the result is 1 if more than half of them pass, else 0."""
    if combine == "majority":
        passes = sum(apply_threshold(threshold, "passed", score) == "passed" for score in scores)
        return float(2 * passes > len(scores))
    if combine == "median":
        from statistics import median  # which few evals need

        return median(scores)
    return min(scores) if combine == "min" else math.fsum(scores) / len(scores)
