"""How one process goes about a run: options that are in no key."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from holdfast.store.manifest import Manifest
    from holdfast.store.rundir import RunDir


class Options(msgspec.Struct, frozen=True):
    """How to go about a run, from the command line or from Python."""

    runs_dir: Path = Path("runs")
    fresh: bool = False
    """archive the earlier run and start from scratch"""
    retry_failed: bool = False
    """retry the errors of a run that was finished with them"""
    accept_errors: bool = False
    """finish even if some trials have errors, which lower the coverage and not the scores"""
    skip_graders: bool = False
    grade_only: bool = False
    """grade the outputs that exist, and never ask the target"""
    outputs_of: tuple[RunDir, Manifest] | None = None
    """the run whose outputs are graded"""
    again: bool = False
    """also grade outputs that have all their verdicts"""
    accept_drift: bool = False
    """keep outputs even if the target's code has changed"""
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
    log_samples: bool = False
    """write the transcripts to samples.jsonl when the run is over"""
    output_path: Path | None = None
    """a folder for the results and transcripts when the run is over"""
    noted: set[str] = set()
    """notices about evals that were shown: the runs of a suite have many in common"""
    command: str = ""
    """what to type to resume the run"""
