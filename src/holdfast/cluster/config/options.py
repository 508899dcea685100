"""Run options of a launch, from the command line."""

from __future__ import annotations

import msgspec


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Run options from the command line; each field matches the `holdfast eval` flag of the same name."""

    fresh: bool = False
    """at the first attempt"""
    retry_failed: bool = False
    """at the first attempt"""
    accept_errors: bool = False
    accept_drift: bool = False
    skip_graders: bool = False
    log_samples: bool = False
    output_path: str | None = None
    """a folder where the run is"""
