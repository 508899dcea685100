"""The user's side of a conversation, as far as it is written in advance: system message, prompt and follow-ups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import AttemptError
from holdfast.spec.template import RENDER_ERRORS, NotText, Template, expression

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.data.dataset import Sample
    from holdfast.spec.load import Eval
    from holdfast.targets.types import Message


class Prompts(NamedTuple):
    """The script rendered for one sample."""

    opening: list[Message]
    """messages before the first user message"""
    texts: list[str]
    """user messages: the prompt, then the follow-ups"""


class Script:
    """The templates of the user's messages."""

    def __init__(self, spec: Eval) -> None:
        self._system = None if spec.system is None else Template(spec.system, texts_only=True)
        self._prompts = [Template(text, texts_only=True) for text in (spec.prompt, *spec.follow_ups)]
        self._row_follow_ups = None if spec.follow_ups_from is None else expression(spec.follow_ups_from)

    @staticmethod
    def identity(spec: Eval) -> dict[str, Any]:
        """Return the part of every generation key that describes the script. Keys that are not used are left out."""
        identity: dict[str, Any] = {"system": spec.system, "prompt": spec.prompt}
        if spec.follow_ups or spec.follow_ups_from:
            identity["follow_ups"] = list(spec.follow_ups) or spec.follow_ups_from
        return identity

    def render(self, sample: Sample) -> Prompts:
        """Render the script for a sample; raise AttemptError for a row that does not fit it."""
        opening = [] if self._system is None else [{"role": "system", "content": _render(self._system, sample)}]
        texts = [_render(template, sample) for template in self._prompts]
        if self._row_follow_ups is not None:
            texts += _evaluate_follow_ups(self._row_follow_ups, sample)
        return Prompts(opening, texts)


def _render(template: Template, sample: Sample) -> str:
    try:
        return template.render(sample.fields)
    except NotText as error:
        raise _unfit(sample, f"cannot render the prompt: {error}", NotText.hint) from error
    except RENDER_ERRORS as error:
        raise _unfit(sample, f"cannot render the prompt: {error}") from error


def _evaluate_follow_ups(evaluate: Callable[[dict[str, Any]], Any], sample: Sample) -> list[str]:
    """Return the follow-ups that a row contains. They are used as written, never as templates."""
    try:
        texts = evaluate(sample.fields)
    except RENDER_ERRORS as error:
        raise _unfit(sample, f"cannot find follow_ups: {error}") from error
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _unfit(sample, f"follow_ups give {texts!r:.80}, not a list of texts")
    return texts


def _unfit(sample: Sample, problem: str, hint: str | None = None) -> AttemptError:
    remedy = hint or "Fix the prompts, or the rows that do not fit them, then run the same command again."
    return AttemptError("bad_request", f"{sample.where}: {problem}", remedy=remedy, retry=False)
