"""Dialects: the APIs of models, one module each.

`types`        the interface of dialects; why an answer ended, and what follows from it
`reading`      helpers of all dialects; images, audio and files in messages
`chat`         OpenAI's chat completions, which most servers speak, and plain completions of a text
`messages`     Anthropic's Messages, also as clouds offer them
`responses`    OpenAI's Responses API
`gemini`       Google's generateContent
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from holdfast.spec.plugins import load_reference

if TYPE_CHECKING:
    from holdfast.dialects.types import Dialect
    from holdfast.spec.providers import ModelEndpoint
    from holdfast.spec.schema import Api


_DIALECTS: Final[dict[Api, str]] = {
    "chat": "holdfast.dialects.chat:CHAT",
    "completions": "holdfast.dialects.chat:COMPLETIONS",
    "messages": "holdfast.dialects.messages:DIALECT",
    "responses": "holdfast.dialects.responses:DIALECT",
    "gemini": "holdfast.dialects.gemini:DIALECT",
}
"""by `api:`, loaded when a model needs one"""


def dialect_of(api: Api) -> Dialect:
    """Return the dialect that `api:` names."""
    return cast("Dialect", load_reference(_DIALECTS[api]))


def dialect_at(endpoint: ModelEndpoint) -> Dialect:
    """Return the dialect of a model's server."""
    return dialect_of(endpoint.api).at(endpoint.access)
