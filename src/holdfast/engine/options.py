"""How one process goes about a run: options that are in no key."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.store.claims import RunPolicy

if TYPE_CHECKING:
    from holdfast.store.manifest import Manifest
    from holdfast.store.rundir import RunDir


class Options(RunPolicy, frozen=True):
    """How to go about a run, from the command line or from Python."""

    runs_dir: Path = Path("runs")
    grade_only: bool = False
    """grade the outputs that exist, and never ask the target"""
    outputs_of: tuple[RunDir, Manifest] | None = None
    """the run whose outputs are graded"""
    again: bool = False
    """also grade outputs that have all their verdicts"""
    cancelled: threading.Event = msgspec.field(default_factory=threading.Event)
    """set from another thread to stop the run as Ctrl-C does"""
    finishing: threading.Event = msgspec.field(default_factory=threading.Event)
    """set from another thread to start nothing new, and let what is in flight finish"""
    abandon_hint: str = ""
    """how the user abandons what is in flight then, for the message that says what the run waits for"""
    wait: float = 0
    """seconds to wait for another process that holds the run; negative: as long as it takes"""
    settle: tuple[str, ...] = ()
    """decisions about calls that were cut off, as `SAMPLE/TRIAL=happened:JSON|again|restart`"""
    wait_for_batches: bool = True
    """False: submit and collect batches, and leave while they are under way"""
    noted: set[str] = msgspec.field(default_factory=set)
    """notices about evals that were shown: the runs of a suite have many in common"""
    command: str = ""
    """what to type to resume the run"""
