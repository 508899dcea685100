"""Dialects: the APIs of models, one module each.

`types`        the interface of dialects; why an answer ended, and what follows from it
`reading`      helpers of all dialects; images, audio and files in messages
`chat`         OpenAI's chat completions, which most servers speak
`completions`  plain completions of a text
`messages`     Anthropic's Messages, also as clouds offer them
`responses`    OpenAI's Responses API
`gemini`       Google's generateContent
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from holdfast.dialects.types import Dialect
    from holdfast.spec.providers import ModelEndpoint
    from holdfast.spec.schema import Api


def dialect_of(api: Api) -> Dialect:
    """Return the dialect that `api:` names."""
    return cast("Dialect", import_module(f"holdfast.dialects.{api}").DIALECT)


def dialect_at(endpoint: ModelEndpoint) -> Dialect:
    """Return the dialect of a model's server."""
    return dialect_of(endpoint.api).at(endpoint.access)
