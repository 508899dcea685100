"""The place of several judges' combined verdict among the graders of a run."""

from __future__ import annotations

from holdfast.graders.types import WaitingGrader


class Votes(WaitingGrader):
    """Stands for a verdict that `plan.votes` computes from those of the judges. Nobody asks it."""
