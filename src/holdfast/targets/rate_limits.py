"""What servers say about when to ask again, in headers and in the bodies of refusals."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_LONGEST: Final = 600.0
_LIMITS: Final = (
    *((f"x-ratelimit-remaining-{unit}", f"x-ratelimit-reset-{unit}") for unit in ("requests", "tokens")),
    *(
        (f"anthropic-ratelimit-{unit}-remaining", f"anthropic-ratelimit-{unit}-reset")
        for unit in ("requests", "tokens", "input-tokens", "output-tokens")
    ),
)
"""headers with what is left of a limit, and with when it is whole again"""
_DURATION: Final = r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?"
_SECONDS: Final = (3600.0, 60.0, 1.0, 0.001)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait, from `retry-after-ms` or `Retry-After` in either of its forms.

    Headers have their names in lower case.
    """
    if re.fullmatch(r"\d+(\.\d+)?", headers.get("retry-after-ms", "")):
        return min(float(headers["retry-after-ms"]) / 1000, _LONGEST)
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return min(float(value), _LONGEST)
    if value:
        import email.utils  # takes long to import

        try:
            moment = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        return min(max(0.0, moment.timestamp() - time.time()), _LONGEST)
    return None


def limit_reset(headers: Mapping[str, str], body: Any) -> float | None:
    """Return the seconds until the limits that are used up are whole again, for a 429 without `Retry-After`."""
    resets = [_seconds(headers.get(reset, "")) for left, reset in _LIMITS if headers.get(left, "").strip() == "0"]
    waits = [wait for wait in (*resets, _delay_in(body)) if wait is not None]
    return min(max(waits), _LONGEST) if waits else None


def _seconds(value: str) -> float | None:
    """Read a duration such as `1s`, `6m0s` or `120ms`, seconds, or a time of RFC 3339."""
    value = value.strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    if value and (match := re.fullmatch(_DURATION, value)):
        return sum(float(part) * unit for part, unit in zip(match.groups(), _SECONDS, strict=True) if part)
    try:
        return max(0.0, datetime.fromisoformat(value).timestamp() - time.time())
    except ValueError:
        return None


def _delay_in(body: Any) -> float | None:
    """Read Google's `RetryInfo`, which is among the details of an error."""
    error = body.get("error") if isinstance(body, dict) else None
    details = error.get("details") if isinstance(error, dict) else None
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, dict) and isinstance(delay := detail.get("retryDelay"), str):
            return _seconds(delay)
    return None
