"""Refusals that every request would meet, and the line of the eval file that ends them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.errors import AttemptError, Fault

_PARAMETER: Final = r"[`'\"]?\b(temperature|top_p|top_k|presence_penalty|frequency_penalty|stop|logprobs|seed)\b[`'\"]?"
_REFUSED: Final = r"(?:not supported|unsupported|does not support|deprecated|not enabled)"
_REMOVE: Final = "Remove `{0}` from target.params: this model does not take it."
_LINES: Final = (
    (
        r"['`\"]([\w.]+)['`\"].{0,120}moved to ['`\"]([\w.]+)['`\"]",
        "Write `{1}` instead of `{0}` in target.params: this API knows only that name.",
    ),
    (
        r"use ['`\"]?max_completion_tokens",
        "Write `max_completion_tokens` instead of `max_tokens` in target.params: this model knows only that name.",
    ),
    (r"v1/responses|Responses API", "Write `api: responses` in target: this model answers such requests only there."),
    (r"use v1/completions", "Write `api: completions` in target: this model has no chat API."),
    (r"max_tokens: Field required", "Write `max_tokens: 4096` in target.params: this API requires a limit."),
    (
        r"['`\"]?\b(\w+)\b['`\"]? and ['`\"]?(\w+)['`\"]? cannot both be specified",
        "Remove `{0}` or `{1}` from target.params: this model takes only one of them.",
    ),
    (
        r"(temperature)['`\"]? may only be set to 1 when thinking",
        "Remove `temperature` from target.params: this model does not take it while it reasons.",
    ),
    (
        r"thinking budget is not supported",
        "Write `reasoning: {{effort: high}}` in target.params: this model takes no limit of its reasoning in tokens.",
    ),
    (
        r"thinking level is not supported",
        "Write `reasoning: {{tokens: 8192}}` in target.params: this model takes no effort, only a limit.",
    ),
    (
        r"thinking can't be disabled|only works in thinking mode",
        "Remove `reasoning` from target.params: this model cannot do without.",
    ),
    (r"developer instruction is not enabled", "Remove `system` from the eval file: this model takes no instructions."),
    (
        r"(?:unrecognized request argument supplied: |unknown parameter: |unknown name )['`\"]?([\w.]+)",
        "Remove `{0}` from target.params: this API does not have it.",
    ),
    (
        r"property ['`\"]([\w.]+)['`\"] is unsupported",
        "Remove `{0}` from target.params: this API does not have it.",
    ),
    (rf"{_PARAMETER}\W.{{0,60}}{_REFUSED}", _REMOVE),
    (rf"{_REFUSED}.{{0,60}}\W{_PARAMETER}", _REMOVE),
)
"""what a server says, and the line to write; the first one that fits counts"""


def explain(error: AttemptError | Fault) -> str | None:
    """Return the line to write, for a refusal by a model that takes other parameters or another API."""
    if error.status not in (400, 404, 422):
        return None
    reason = re.sub(r"^https?://\S+ [^:]*: ", "", error.message)  # the address may name an API too
    for pattern, line in _LINES:
        if match := re.search(pattern, reason, re.IGNORECASE | re.DOTALL):
            return line.format(*match.groups())
    return None
