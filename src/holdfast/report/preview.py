"""A preview of a run: the messages for the first sample, and an estimate of the tokens for all of them."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.conversation.script import Script
from holdfast.display.format import dollars
from holdfast.errors import AttemptError
from holdfast.graders.likelihood import expected_positions
from holdfast.plan.changes import format_count
from holdfast.plan.identity import installed_code
from holdfast.report.estimate import LOOKED_AT, estimate
from holdfast.spec.providers import endpoint_of
from holdfast.spec.redact import bare_url
from holdfast.spec.schema import is_embedded
from holdfast.spec.target_schema import ModelTarget
from holdfast.store.records import content_text
from holdfast.targets.concurrency import concurrency_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from holdfast.plan.identity import RunIdentity
    from holdfast.plan.plan import Plan
    from holdfast.report.estimate import RunEstimate
    from holdfast.spec.eval import Eval
    from holdfast.store.rundir import RunDir
    from holdfast.targets.types import Continuation, Message

_SHOWN: Final = 2_000
"""characters of one message"""


class Preview(NamedTuple):
    """The first sample's messages, and an estimate for the trials that are to be run."""

    sample: str
    where: str
    messages: list[Message]
    """all that is known before the target answers: system, prompt and follow-ups"""
    estimate: RunEstimate
    installed: list[str]
    """modules that are identified by the version of their distribution, not by their code"""
    continuations: tuple[Continuation, ...] = ()
    """the first sample's, where likelihoods are asked for"""
    expected: tuple[int, ...] = ()
    """positions of the right continuations"""
    asked: str | None = None
    """where and how a model is asked"""

    def lines(self) -> Iterator[str]:
        """Describe it for people."""
        yield f"first sample: {self.sample}" + (f" ({self.where})" if self.where else "")
        for message in self.messages:
            yield from _indented(f"{message['role']}: ", content_text(message["content"]))
        prompt = content_text(self.messages[-1]["content"])
        yield from continuation_lines(prompt, self.continuations, self.expected)
        if self.asked is not None:
            yield self.asked
        taken = self.estimate
        if taken.trials:
            cost = "" if taken.cost is None else f", about {dollars(taken.cost)}"
            cost += "" if taken.prices_of is None else f" at the prices of {taken.prices_of}"
            trials = format_count(taken.trials, "trial")
            yield f"about {taken.tokens:,} tokens to send for {trials}{cost}; {taken.beside}"
        for module in self.installed:
            yield f"identified by version: {module}"
        yield from taken.batch_lines()

    def as_dict(self) -> dict[str, Any]:
        """Describe it for scripts."""
        continuations = [msgspec.structs.asdict(continuation) for continuation in self.continuations]
        fields = {key: value for key, value in self._asdict().items() if key != "estimate"}
        return {**fields, **self.estimate.as_dict(), "continuations": continuations}


def continuation_lines(prompt: str, continuations: Iterable[Continuation], expected: Collection[int]) -> Iterator[str]:
    """Describe continuations of a prompt, with an arrow before the right ones."""
    for number, each in enumerate(continuations):
        shown = each.text if each.context is None else f"{each.context.removeprefix(prompt)} …{each.text}"
        yield from _indented("→ " if number in expected else "  ", shown)


def _indented(label: str, text: str) -> Iterator[str]:
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} … ({len(text):,} characters)"
    first, *rest = shown.split("\n")
    yield f"  {label}{first}"
    yield from (f"    {line}" for line in rest)


def _describe_endpoint(spec: Eval, target: ModelTarget) -> str:
    """Say where and how a model is asked."""
    concurrency = concurrency_of(spec)
    at_once = "as many requests at once as it keeps up with" if concurrency is None else f"up to {concurrency} at once"
    if target.batch is not None and target.batch.via == "files":
        return f"{target.model} is asked with files, which you have answered with `vllm run-batch`"
    if is_embedded(target.model):
        return f"{target.model} is asked on this machine, {at_once}"
    endpoint = endpoint_of(target.model, target.api, target.base_url, target.api_key_env)
    places = ", ".join(map(bare_url, endpoint.urls))
    return f"{endpoint.model} is asked at {places} by the {endpoint.api} API, {at_once}"


def preview(identity: RunIdentity, plan: Plan, rundir: RunDir) -> Preview:
    """Render the first samples of an eval as they would be sent."""
    script, spec = Script(identity.spec), identity.spec
    samples = list(islice(identity.dataset, LOOKED_AT))
    first = samples[0]
    messages: list[Message] = []
    continuations: tuple[Continuation, ...] = ()
    expected: tuple[int, ...] = ()
    rendered = []
    for sample in samples:
        try:
            prompts = script.render(sample)
        except AttemptError as error:
            if sample is first:
                messages = [{"role": "error", "content": error.message}]
            continue
        rendered.append(prompts)
        if sample is first:
            messages = [*prompts.opening, *({"role": "user", "content": content} for content in prompts.contents)]
            continuations, expected = prompts.continuations, expected_positions(spec, sample)
    return Preview(
        first.id,
        first.where,
        messages,
        estimate(spec, rendered, plan, rundir),
        installed_code(identity),
        continuations,
        expected,
        _describe_endpoint(spec, spec.target) if isinstance(spec.target, ModelTarget) else None,
    )
