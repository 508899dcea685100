"""Refusals that every request would meet, and the line of the eval file that ends them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.errors import AttemptError, Fault

_PARAMETER: Final = r"[`'\"]?(temperature|top_p|top_k|presence_penalty|frequency_penalty|stop|logprobs)[`'\"]?"
_REFUSED: Final = r"(?:not supported|unsupported|does not support|deprecated)"
_LINES: Final = (
    (r"/v1/responses|Responses API", "Write `api: responses` in target: this model answers such requests only there."),
    (
        r"max_completion_tokens",
        "Write `max_completion_tokens` instead of `max_tokens` in target.params: this model knows only that name.",
    ),
    (
        r"(?:unknown parameter|unrecognized request argument supplied): '?(\w+)",
        "Remove `{0}` from target.params: this API does not have it.",
    ),
    (rf"{_PARAMETER}\W.{{0,60}}{_REFUSED}", "Remove `{0}` from target.params: this model does not take it."),
    (rf"{_REFUSED}.{{0,60}}\W{_PARAMETER}", "Remove `{0}` from target.params: this model does not take it."),
)


def explain(error: AttemptError | Fault) -> str | None:
    """Return the line to write, for a refusal by a model that takes other parameters or another API."""
    if error.status not in (400, 404, 422):
        return None
    reason = re.sub(r"^https?://\S+ [^:]*: ", "", error.message)  # the address may name an API too
    for pattern, line in _LINES:
        if match := re.search(pattern, reason, re.IGNORECASE | re.DOTALL):
            return line.format(*match.groups())
    return None
