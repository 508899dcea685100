"""Checks of an eval as a whole: keys that contradict each other, and graders that can hardly fail.

Each check yields every problem with its location, so that all of them are reported at once. Graders that can hardly
fail may be intended, and only get a notice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from holdfast.spec.eval_schema import RUN_METRICS, SETTINGS
from holdfast.spec.named_inputs import misnamed_parts
from holdfast.spec.providers import provider_of
from holdfast.spec.target_schema import ModelTarget
from holdfast.spec.template import TemplateSyntaxError, expression
from holdfast.spec.validation import suggest

if TYPE_CHECKING:
    from collections.abc import Iterator, Set

    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval
    from holdfast.spec.eval_schema import EvalFields, GateBlock

_GATED: Final = ("score", "low", "high", "corpus")
"""numbers of a grader that can be gated as `GRADER/NUMBER`, in addition to `pass@k` and `pass^k`"""


def data_problems(data: dict[str, Any]) -> Iterator[tuple[Location, str]]:
    """Yield problems of the file's data as such, whatever its keys mean."""
    for location in _not_finite(data):
        if location[:1] != ("samples",):  # the dataset reports the ones in rows
            yield location, "NaN and infinity are not valid JSON numbers"
    has_dataset, has_samples = (data.get(key) is not None for key in ("dataset", "samples"))
    if has_dataset and has_samples:
        yield ("samples",), "give either `dataset` or `samples`, not both"
    elif not has_dataset and not has_samples:
        yield (), "give either `dataset` or `samples`"


def _not_finite(node: Any, location: Location = ()) -> Iterator[Location]:
    """Yield the locations of NaN and infinity, which YAML writes as .nan and .inf."""
    if isinstance(node, float) and not math.isfinite(node):
        yield location
    elif isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _not_finite(value, (*location, key))


def conversation_problems(top: EvalFields) -> Iterator[tuple[Location, str]]:
    """Yield keys of the conversation that contradict each other, and missing ones."""
    of_the_row = top.responder is not None and isinstance(top.responder.max_followups, str)
    if top.responder is not None and top.follow_ups and not (of_the_row and isinstance(top.follow_ups, str)):
        yield ("responder",), "give either follow_ups or a responder, not both"
    if top.messages is None:
        if top.prompt is None:
            yield ("prompt",), "is missing; give either `prompt` or `messages`"
        return
    others = {"prompt": top.prompt, "history": top.history, "continuations": top.continuations}
    for key, value in others.items():
        if value is not None:
            yield (key,), f"`messages` are the whole conversation so far: leave out `{key}`"
    if isinstance(top.messages, list) and top.messages[-1].role != "user":
        location = ("messages", len(top.messages) - 1, "role")
        yield location, "the last message is the user's, which the target answers"


def gate_problems(gate: GateBlock, graders: Set[str], trials: int) -> Iterator[tuple[Location, str]]:
    """Yield wrong names under `gate`; `holdfast gate --min` accepts the same names of metrics."""
    for name in graders & gate.model_fields_set & set(SETTINGS):
        message = "is both a setting of the gate and the name of a grader: rename the grader"
        yield ("gate", name), message
    for name in gate.minima:
        if (problem := _gate_problem(name, graders, frozenset(RUN_METRICS), trials)) is not None:
            yield ("gate", name), problem


def _gate_problem(name: str, graders: Set[str], whole: Set[str], trials: int) -> str | None:
    """Describe the problem with the name of a metric; None if it is right."""
    if name in graders | whole:
        return None
    grader, _, number = name.rpartition("/")
    if grader not in graders:
        return f"no grader of this name{suggest(name, graders | whole)}"
    every_k = range(1, trials + 1)
    if number in _GATED or number in {f"pass@{k}" for k in every_k} | {f"pass^{k}" for k in every_k[1:]}:
        return None
    passes = "pass@1" if trials == 1 else f"pass@1 to pass@{trials}, pass^2 to pass^{trials}"
    return f"{grader!r} has no number {number!r}; it has {', '.join(_GATED)} and {passes}"


def eval_problems(spec: Eval) -> Iterator[tuple[Location, str]]:
    """Yield contradictions between blocks that are valid by themselves."""
    yield from misnamed_parts(spec)
    for place, grader in spec.placed_graders():
        if grader.needs_workspace and spec.workspace is None:
            yield place, f"{grader.type} looks at files, but the eval has no workspace: add `workspace: {{}}`"
    yield from _likelihood_problems(spec)
    yield from _limit_problems(spec)
    for each in spec.templates():
        try:
            each.compile()
        except TemplateSyntaxError as error:
            yield each.location, f"not a valid template: {error.message}"
    for place, formula in spec.expressions():
        try:
            expression(formula)
        except TemplateSyntaxError as error:
            yield place, f"not a valid expression: {error.message}"


def _likelihood_problems(spec: Eval) -> Iterator[tuple[Location, str]]:
    """Yield keys that contradict `continuations`, and graders that need them."""
    if spec.continuations is None:
        for place, grader in spec.placed_graders():
            if grader.type == "likelihood":
                yield place, "likelihood compares continuations, but the eval has no `continuations`: add them"
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


def _limit_problems(spec: Eval) -> Iterator[tuple[Location, str]]:
    """Yield limits that cannot be enforced for the target."""
    limits, target = spec.limits, spec.target
    if limits.trial is not None:
        for name in limits.trial.model_dump(exclude_none=True):
            if not (target.counts_calls or (name == "time" and target.works_alone)):
                message = (
                    "the target's model calls are not seen one by one: limits of a trial are for agents, "
                    "functions, programs behind the proxy and models with tools"
                )
                yield ("limits", "trial", name), message
    elif limits.on_limit == "score" and not target.works_alone:
        yield ("limits", "on_limit"), "only agents, programs and functions can be scored at a time-out: add `trial`"
    if limits.on_exit is not None and not target.has_exit_code:
        yield ("limits", "on_exit"), "the target is not a program, so it has no exit code"


def vacuous_checks(spec: Eval) -> Iterator[str]:
    """Yield a notice for each check that passes, or fails, whatever the answer is."""
    for location, block in spec.placed_graders():
        for warning in block.idle_checks():
            yield f"{spec.document.where(location)}: {warning}"
    if spec.graders and all(block.weight == 0 for block in spec.graders):
        where = spec.document.where(("graders",))
        yield f"{where}: every grader has weight 0, so trials have no overall score and none passes"
