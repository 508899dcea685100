"""Checks of an eval whose model is asked for likelihoods instead of replies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.spec.providers import provider_of
from holdfast.spec.target_schema import ModelTarget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.spec.document import Location
    from holdfast.spec.load import Eval


def likelihood_problems(spec: Eval) -> Iterator[tuple[Location, str]]:
    """Yield what does not go together with `continuations`, or needs them, with its location."""
    if spec.continuations is None:
        for place, grader in spec.placed_graders():
            if grader.type == "likelihood":
                yield place, "likelihood compares continuations, and the eval has none: add `continuations`"
        return
    target = spec.target
    if not isinstance(target, ModelTarget):
        yield ("continuations",), "only a model has likelihoods: use a `model` as target, or leave out `continuations`"
        return
    provider, _ = provider_of(target.model, target.base_url)
    if not provider.completions:
        yield (
            ("target", "model"),
            f"{target.model} cannot be asked for likelihoods: name a server that has them as `base_url`, such as vLLM",
        )
    elif target.api != "completions":
        yield (
            ("target", "api"),
            "likelihoods are of plain text, without a chat template: set `api: completions`",
        )
    for key, value in {"tools": target.tools, "stream": target.stream, "schema": target.json_schema}.items():
        if value:
            yield ("target", key), f"`continuations` ask for likelihoods, not for a reply: leave out `{key}`"
    conversation = {
        "follow_ups": spec.follow_ups or spec.follow_ups_from,
        "responder": spec.responder,
        "checkpoints": spec.checkpoints,
    }
    for key, value in conversation.items():
        if value:
            yield (key,), f"`continuations` end the conversation with the prompt: leave out `{key}`"
