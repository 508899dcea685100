"""Slurm's way of writing times: minutes, `MM:SS`, `HH:MM:SS`, `D-HH:MM:SS`; also Holdfast's `90m` and `4h`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from holdfast.spec.quantities import parse_duration


def walltime(value: Any) -> Any:
    """Normalize a time to `HH:MM:SS`, which every Slurm command reads alike."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return value
    seconds = walltime_seconds(value)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def walltime_seconds(value: str | int) -> int:
    """Return the length of a time in seconds; ValueError if it is not one."""
    text = str(value).strip().lower()
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if parts is None:
        if not re.fullmatch(r"[\d.\s]+[hms][\d.\shmin]*s?", text):
            raise ValueError('a time must be written as "HH:MM:SS", "D-HH:MM:SS", a number of minutes, or 4h')
        seconds = int(parse_duration(text))
    elif parts[1] is not None:  # after days come hours
        days, hours, minutes, rest = (int(part or 0) for part in parts.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        numbers = [int(part) for part in parts.groups()[1:] if part is not None]
        if len(numbers) < 3:  # minutes, or minutes and seconds
            numbers = [0, *numbers, *([0] if len(numbers) == 1 else [])]
        seconds = numbers[0] * 3600 + numbers[1] * 60 + numbers[2]
    if seconds <= 0:
        raise ValueError("a time must be longer than 0")
    return seconds


def margin(value: str) -> int:
    """Return how many seconds before its time limit a job stops cleanly: two minutes, less for short jobs."""
    return min(120, walltime_seconds(value) // 4)


Walltime = Annotated[str, BeforeValidator(walltime)]
