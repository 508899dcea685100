"""Durations and sizes as people write them."""

from __future__ import annotations

import re
from typing import Any

_DURATION = r"(?:(\d+(?:\.\d+)?)h)?\s*(?:(\d+(?:\.\d+)?)m(?:in)?)?\s*(?:(\d+(?:\.\d+)?)s)?"


def parse_duration(value: Any) -> Any:
    """Seconds from `90`, `90s`, `5m`, `2h` or `1h30m`."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    match = re.fullmatch(_DURATION, text)
    if not text or match is None:
        raise ValueError("a duration such as 90, 90s, 5m or 1h30m")
    hours, minutes, seconds = (float(group or 0) for group in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def parse_size(value: Any) -> Any:
    """Bytes from `65536`, `64MB`, `1.5 GB` or `512 KiB`."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", value.strip().lower())
    if match is None:
        raise ValueError("a size such as 65536, 64MB or 1.5GB")
    number, unit, binary = match.groups()
    return round(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit or " "))
