"""The user's side of a conversation, as far as it is written in advance.

System message, history, prompt and follow-ups; or, instead of follow-ups, the continuations of the prompt.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.errors import AttemptError
from holdfast.spec.schema import ModelTarget
from holdfast.spec.template import RENDER_ERRORS, NotText, Template, expression
from holdfast.targets.types import Continuation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.data.dataset import Sample
    from holdfast.spec.load import Eval
    from holdfast.targets.types import Message


_LIST: Final = (list, tuple)


class Prompts(NamedTuple):
    """The script rendered for one sample."""

    opening: list[Message]
    """messages before the first user message"""
    texts: list[str]
    """user messages: the prompt, then the follow-ups"""
    continuations: tuple[Continuation, ...] = ()
    """texts whose likelihood is asked for instead of a reply"""
    params: Mapping[str, Any] = MappingProxyType({})
    """the row's own parameters of requests to a model"""


class Script:
    """The templates of the user's messages."""

    def __init__(self, spec: Eval) -> None:
        self._system = None if spec.system is None else Template(spec.system, texts_only=True)
        self._prompts = [Template(text, texts_only=True) for text in (spec.prompt, *spec.follow_ups)]
        self._row_follow_ups = None if spec.follow_ups_from is None else expression(spec.follow_ups_from)
        self._history = spec.history
        self._continuations = spec.continuations
        self._params = spec.target.params_from if isinstance(spec.target, ModelTarget) else None

    @staticmethod
    def identity(spec: Eval) -> dict[str, Any]:
        """Return the part of every generation key that describes the script. Keys that are not used are left out."""
        identity: dict[str, Any] = {"system": spec.system, "prompt": spec.prompt}
        if spec.follow_ups or spec.follow_ups_from:
            identity["follow_ups"] = list(spec.follow_ups) or spec.follow_ups_from
        if spec.history is not None:
            identity["history"] = spec.history
        if spec.continuations is not None:
            identity["continuations"] = spec.continuations
        return identity

    def render(self, sample: Sample) -> Prompts:
        """Render the script for a sample; raise AttemptError for a row that does not fit it."""
        opening = [] if self._system is None else [{"role": "system", "content": _render(self._system, sample)}]
        if self._history is not None:
            opening += _evaluate_history(self._history, sample)
        texts = [_render(template, sample) for template in self._prompts]
        if self._row_follow_ups is not None:
            texts += _evaluate_follow_ups(self._row_follow_ups, sample)
        continuations = () if self._continuations is None else evaluate_continuations(self._continuations, sample)
        params = MappingProxyType({}) if self._params is None else _evaluate_params(self._params, sample)
        return Prompts(opening, texts, continuations, params)


def evaluate_continuations(formula: str, sample: Sample) -> tuple[Continuation, ...]:
    """Return the continuations that a row contains. They are used as written, never as templates."""
    values = _evaluate(formula, sample, "continuations")
    if not isinstance(values, _LIST) or not values:
        raise _unfit(sample, f"continuations give {values!r:.80}, not a list of texts")
    return tuple([Continuation(value) if isinstance(value, str) else _pair(value, sample) for value in values])


def _pair(value: Any, sample: Sample) -> Continuation:
    """Return a continuation that has a context of its own, or none."""
    if not isinstance(value, dict) or not value.keys() <= {"text", "context", "rolling"} or "text" not in value:
        raise _unfit(sample, f"a continuation is {value!r:.80}, not a text or a mapping with `text` and `context`")
    text, context, rolling = value["text"], value.get("context"), value.get("rolling", False)
    if not isinstance(text, str) or not isinstance(context, str | None):
        raise _unfit(sample, f"a continuation is {value!r:.80}: `text` and `context` are texts")
    if not isinstance(rolling, bool) or (rolling and context is not None):
        raise _unfit(sample, f"a continuation is {value!r:.80}: `rolling` is true or false, and has no `context`")
    return Continuation(text, context, rolling)


def _evaluate_history(formula: str, sample: Sample) -> list[Message]:
    """Return the messages that a row places before its prompt. They are used as written, never as templates."""
    values = _evaluate(formula, sample, "history")
    if not isinstance(values, _LIST):
        raise _unfit(sample, f"history gives {values!r:.80}, not a list of messages")
    for value in values:
        fits = isinstance(value, dict) and value.keys() == {"role", "content"} and isinstance(value["content"], str)
        if not fits or value["role"] not in ("system", "user", "assistant"):
            raise _unfit(
                sample,
                f"a message of history is {value!r:.80}, not a mapping with `role` (system, user or assistant) and "
                "`content`",
            )
    return [{"role": value["role"], "content": value["content"]} for value in values]


def _evaluate_params(formula: str, sample: Sample) -> dict[str, Any]:
    params = _evaluate(formula, sample, "target.params_from")
    if not isinstance(params, dict):
        raise _unfit(sample, f"target.params_from gives {params!r:.80}, not a mapping")
    return params


def _evaluate(formula: str, sample: Sample, key: str) -> Any:
    try:
        return expression(formula)(sample.fields)
    except RENDER_ERRORS as error:
        raise _unfit(sample, f"cannot evaluate {key}: {error}") from error


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
