"""What belongs to this attempt at a run, and not to the run."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.store.manifest import Manifest
    from holdfast.store.rundir import RunDir


@dataclass(frozen=True)
class Options:
    """How to go about it. None of this is in any key."""

    runs_dir: Path = Path("runs")
    fresh: bool = False
    """set an earlier run of the same aside and start anew"""
    retry_failed: bool = False
    """take up a run that was finished with errors accepted"""
    accept_errors: bool = False
    """finish although some trials have errors; they are left out of the scores and named in the coverage"""
    skip_graders: bool = False
    grade_only: bool = False
    """never ask the target: grade the outputs that are there"""
    outputs_of: tuple[RunDir, Manifest] | None = None
    """the run whose outputs are to be graded"""
    again: bool = False
    """grade anew what has its verdicts already"""
    accept_drift: bool = False
    """keep outputs although the target's code has changed"""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """set from another thread to stop the run as Ctrl-C would"""
    wait: float = 0
    """seconds to wait for another process that holds the run"""
