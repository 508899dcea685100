"""A preview of a run: the messages for the first sample, and an estimate of the tokens for all of them."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.conversation.script import Script
from holdfast.display.format import dollars
from holdfast.errors import AttemptError, ResultsError, VersionError
from holdfast.graders.likelihood import expected_positions
from holdfast.plan.identity import installed_code
from holdfast.spec.providers import endpoint_of
from holdfast.spec.redact import bare_url
from holdfast.spec.schema import ModelTarget, is_embedded
from holdfast.store.records import content_text
from holdfast.store.rundir import RunDir
from holdfast.targets.concurrency import concurrency_of
from holdfast.targets.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from holdfast.conversation.script import Prompts
    from holdfast.plan.identity import RunIdentity
    from holdfast.plan.plan import Plan
    from holdfast.spec.load import Eval
    from holdfast.store.metrics import Metrics
    from holdfast.targets.types import Continuation, Message

_LOOKED_AT: Final = 200
"""rows from which the length of all is estimated"""
_CHARACTERS: Final = 4
"""per token, roughly, in English"""
_SHOWN: Final = 2_000
"""characters of one message"""


class Preview(NamedTuple):
    """The first sample's messages, and an estimate for the trials that are to be run."""

    sample: str
    where: str
    messages: list[Message]
    """all that is known before the target answers: system, prompt and follow-ups"""
    trials: int
    tokens: int
    """about so many, sent once per trial; conversations and tools send more"""
    cost: float | None
    """in dollars, of these tokens; None where the price is not known"""
    installed: list[str]
    """modules that are identified by the version of their distribution, not by their code"""
    prices_of: str | None = None
    """the date of the price table, where the cost comes from there"""
    continuations: tuple[Continuation, ...] = ()
    """the first sample's, where likelihoods are asked for"""
    expected: tuple[int, ...] = ()
    """positions of the right continuations"""
    asked: str | None = None
    """where and how a model is asked"""
    replies: int | None = None
    """tokens of the replies, about as many as an earlier run of this eval had; None where there is none"""
    replies_of: str | None = None
    """the id and the target of that run"""

    def lines(self) -> Iterator[str]:
        """Describe it for people."""
        yield f"first sample: {self.sample}" + (f" ({self.where})" if self.where else "")
        for message in self.messages:
            yield from _indented(f"{message['role']}: ", content_text(message["content"]))
        prompt = content_text(self.messages[-1]["content"])
        yield from continuation_lines(prompt, self.continuations, self.expected)
        if self.asked is not None:
            yield self.asked
        if self.trials:
            cost = "" if self.cost is None else f", about {dollars(self.cost)}"
            cost += "" if self.prices_of is None else f" at the prices of {self.prices_of}"
            trials = "1 trial" if self.trials == 1 else f"{self.trials:,} trials"
            beside = "without replies, later turns and judges"
            if self.replies is not None:
                beside = f"with {self.replies:,} tokens of replies as in run {self.replies_of}; without judges"
            yield f"about {self.tokens:,} tokens to send for {trials}{cost}; {beside}"

        for module in self.installed:
            yield f"identified by version: {module}"

    def as_dict(self) -> dict[str, Any]:
        """Describe it for scripts."""
        continuations = [msgspec.structs.asdict(continuation) for continuation in self.continuations]
        return {**self._asdict(), "messages": self.messages, "continuations": continuations}


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


def _characters(prompts: Prompts) -> int:
    """Count what the first requests of a trial send: the prompt, or each continuation with its context."""
    contents = [*(message["content"] for message in prompts.opening), prompts.contents[0]]
    messages = sum(len(content_text(content)) for content in contents)
    if not prompts.continuations:
        return messages
    return sum(len(each.text) + _context_characters(each, messages) for each in prompts.continuations)


def _context_characters(continuation: Continuation, prompt: int) -> int:
    if continuation.rolling:  # such a text stands alone
        return 0
    return prompt if continuation.context is None else len(continuation.context)


def _earlier_run(rundir: RunDir) -> Metrics | None:
    """Return the numbers of a finished run of the same eval: one of the same target, else the newest."""
    finished: list[tuple[bool, float, Metrics]] = []
    for path in rundir.path.parent.glob("*/metrics.json"):
        other = RunDir(path.parent)
        with suppress(ResultsError, VersionError, OSError):
            metrics = other.read_metrics()
            if metrics is not None and metrics.outputs and metrics.usage.output_tokens is not None:
                same = other.path.name.rpartition("-")[0] == rundir.path.name.rpartition("-")[0]
                finished.append((same, path.stat().st_mtime, metrics))
    return max(finished, key=lambda run: run[:2])[2] if finished else None


def _describe_endpoint(spec: Eval, target: ModelTarget) -> str:
    """Say where and how a model is asked."""
    concurrency = concurrency_of(spec)
    at_once = "as many requests at once as it keeps up with" if concurrency is None else f"up to {concurrency} at once"
    if is_embedded(target.model):
        return f"{target.model} is asked on this machine, {at_once}"
    endpoint = endpoint_of(target.model, target.api, target.base_url, target.api_key_env)
    places = ", ".join(map(bare_url, endpoint.urls))
    return f"{endpoint.model} is asked at {places} by the {endpoint.api} API, {at_once}"


def preview(identity: RunIdentity, plan: Plan, rundir: RunDir) -> Preview:
    """Render the first samples of an eval as they would be sent."""
    script, spec = Script(identity.spec), identity.spec
    samples = list(islice(identity.dataset, _LOOKED_AT))
    first = samples[0]
    messages: list[Message] = []
    continuations: tuple[Continuation, ...] = ()
    expected: tuple[int, ...] = ()
    lengths = []
    for sample in samples:
        try:
            prompts = script.render(sample)
        except AttemptError as error:
            if sample is first:
                messages = [{"role": "error", "content": error.message}]
            continue
        questions = [{"role": "user", "content": content} for content in prompts.contents]
        if sample is first:
            messages = [*prompts.opening, *questions]
            continuations, expected = prompts.continuations, expected_positions(spec, sample)
        lengths.append(_characters(prompts))
    tokens = round(sum(lengths) / len(lengths) / _CHARACTERS * plan.to_run) if lengths else 0
    cost = prices_of = asked = replies = replies_of = None
    if isinstance(spec.target, ModelTarget):
        prices = Prices(spec.target.model, spec.prices)
        if spec.continuations is None and (earlier := _earlier_run(rundir)) is not None:
            assert earlier.usage.output_tokens is not None
            replies = round(earlier.usage.output_tokens / earlier.outputs * plan.to_run)
            replies_of = f"{earlier.run} ({earlier.target})"
        cost, prices_of = prices.estimate(tokens, replies or 0, plan.to_run), prices.date
        asked = _describe_endpoint(spec, spec.target)
    return Preview(
        first.id,
        first.where,
        messages,
        plan.to_run,
        tokens,
        cost,
        installed_code(identity),
        prices_of,
        continuations,
        expected,
        asked,
        replies,
        replies_of,
    )
