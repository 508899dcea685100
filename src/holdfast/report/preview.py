"""What `--dry-run` shows: the plan, the messages of the first sample, and an estimate of tokens, dollars and batches.

Requests are estimated from the rows to the extent that their text is fixed in advance. Replies are assumed to be as
long as in an earlier run of the eval. If a model decides how many requests there are, with tools or a simulated user,
the earlier run also supplies their number and length.
"""

from __future__ import annotations

from contextlib import suppress
from io import StringIO
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from rich.text import Text

from holdfast.conversation.turns import Script
from holdfast.display.format import dollars
from holdfast.display.grid import make_console
from holdfast.display.terminal import echo, echo_json
from holdfast.errors import AttemptError, ResultsError, VersionError
from holdfast.graders.build import grader_places
from holdfast.http.urls import bare_url
from holdfast.plan.changes import format_count
from holdfast.plan.identity import installed_code
from holdfast.spec.plugins import load_reference
from holdfast.spec.providers import endpoint_of
from holdfast.spec.redact import without_secrets
from holdfast.spec.schema import is_embedded
from holdfast.spec.target_schema import ModelTarget
from holdfast.store.records import content_text
from holdfast.store.rundir import RunDir
from holdfast.targets.build import concurrency_of
from holdfast.targets.prices import Prices
from holdfast.targets.types import most_requests

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from holdfast.conversation.turns import Prompts
    from holdfast.plan.identity import RunIdentity
    from holdfast.plan.plan import Plan
    from holdfast.spec.eval import Eval
    from holdfast.store.metrics import Metrics
    from holdfast.targets.types import Continuation, Message

LOOKED_AT: Final = 200
"""rows from which the length of all rows is estimated"""
_CHARACTERS: Final = 4
"""per token, roughly, in English"""


class Batching(NamedTuple):
    """The batches that a run would take."""

    batches: int
    waves: int
    """batches, or groups of batches, one after the other"""
    cost: float | None
    """in dollars; None if it is unknown, or not lower"""


class RunEstimate(NamedTuple):
    """An estimate for the trials that are to be run."""

    trials: int
    requests: int
    tokens: int
    """to send"""
    at_least: bool
    """the model or the simulated user may add requests, and there is no earlier run to estimate them from"""
    cost: float | None
    """in dollars, of what is sent and of the replies if their number is known; None if the price is unknown"""
    prices_of: str | None
    """the date of the price table, if the cost comes from it"""
    replies: int | None
    """tokens of the replies, about as many as an earlier run of this eval had; None without an earlier run"""
    replies_of: str | None
    """the id and the target of that run"""
    batching: Batching | None
    """None: the target is not asked in batches"""
    judged_in_batches: int
    """requests of judges in batches, which follow"""

    def cost_lines(self) -> Iterator[str]:
        """Describe what a run will cost, unless that is unknown or nothing, and the batches that it will take."""
        if self.batching is None and self.cost and self.trials:
            less = "at least" if self.at_least or self.replies is None else "about"
            table = "" if self.prices_of is None else f" at the prices of {self.prices_of}"
            yield f"{less} {dollars(self.cost)} for {format_count(self.trials, 'trial')}{table}; {self.scope}"
        yield from self.batch_lines()

    @property
    def scope(self) -> str:
        """Describe what the estimate includes besides the prompts, and what it leaves out."""
        if self.replies is not None:
            return f"with {self.replies:,} tokens of replies as in run {self.replies_of}; without judges"
        return f"without replies{', further steps' if self.at_least else ''} and judges"

    def batch_lines(self) -> Iterator[str]:
        """Describe the batches that the run will take, and what they cost."""
        if self.batching is not None and self.trials:
            batches, waves, cost = self.batching
            line = (
                f"{format_count(self.requests, 'request')} in {'1 batch' if batches == 1 else f'{batches:,} batches'}"
            )
            if waves > 1:
                line += f", in {waves} waves one after the other"
            if self.at_least:
                line = f"at least {line}, and another wave for each further step or turn"
            if cost is not None and self.cost is not None:
                less = "at least" if self.at_least else "about"
                line += f", {less} {dollars(cost)} instead of {dollars(self.cost)}"
            yield line
        if self.judged_in_batches:
            yield f"{format_count(self.judged_in_batches, 'request')} of judges in batches, after the outputs"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**self._asdict(), "batching": None if self.batching is None else self.batching._asdict()}


def estimate_run(identity: RunIdentity, plan: Plan, rundir: RunDir) -> RunEstimate:
    """Estimate what the rest of a run takes, from the first rows of its dataset."""
    script, prompts = Script(identity.spec), []
    for sample in islice(identity.dataset, LOOKED_AT):
        with suppress(AttemptError):  # the run reports rows that do not fit
            prompts.append(script.render(sample))
    return estimate(identity.spec, prompts, plan, rundir)


def estimate(spec: Eval, prompts: Sequence[Prompts], plan: Plan, rundir: RunDir) -> RunEstimate:
    """Estimate what the rest of a run takes, from the messages of some samples."""
    target, trials = spec.target, plan.to_run
    judged = (trials + plan.to_grade) * sum(
        getattr(place.block, "batch", None) is not None and not place.votes for place in grader_places(spec)
    )
    waves = _waves(prompts, trials)
    requests, tokens = sum(waves), _share(sum(map(_characters, prompts)) / _CHARACTERS, prompts, trials)
    if not isinstance(target, ModelTarget):
        return RunEstimate(trials, requests, tokens, False, None, None, None, None, None, judged)
    open_ended = bool(target.tools) or spec.responder is not None
    replies = replies_of = None
    if spec.continuations is None and (earlier := _earlier_run(rundir)) is not None:
        assert earlier.usage.output_tokens is not None
        replies = round(earlier.usage.output_tokens / earlier.outputs * trials)
        replies_of = f"{earlier.run} ({earlier.target})"
        if open_ended and earlier.usage.input_tokens is not None:
            requests = max(requests, round(earlier.usage.requests / earlier.outputs * trials))
            tokens = round(earlier.usage.input_tokens / earlier.outputs * trials)
        else:  # each reply is sent again with every later turn
            tokens += round(sum(number * count for number, count in enumerate(waves)) * replies / max(1, requests))
    prices = Prices(target.model, spec.prices)
    cost = prices.estimate(tokens, replies or 0, requests)
    batching = None
    if target.batch is not None:
        cheaper = prices.estimate(tokens, replies or 0, requests, batch=True)
        known = cheaper is not None and cost is not None and cheaper < cost
        size = target.batch.size or trials
        endpoint = endpoint_of(target.model, target.api, target.base_url, target.api_key_env)
        most = max(1, min(most_requests(endpoint), size))
        batching = Batching(sum(-(-count // most) for count in waves), len(waves), cheaper if known else None)
    at_least = open_ended and replies is None
    return RunEstimate(trials, requests, tokens, at_least, cost, prices.date, replies, replies_of, batching, judged)


def _waves(prompts: Sequence[Prompts], trials: int) -> list[int]:
    """Return how many trials have a first turn, how many a second, and so on."""
    turns = [len(each.contents) for each in prompts]
    counts = [_share(sum(turn > number for turn in turns), prompts, trials) for number in range(max(turns, default=1))]
    return [count for count in counts if count] or [trials]


def _share(total: float, prompts: Sequence[Prompts], trials: int) -> int:
    return round(total / len(prompts) * trials) if prompts else 0


def _characters(prompts: Prompts) -> int:
    """Count what the requests of a trial send: each turn with all before it, or each continuation with its context."""
    turn = sum(len(content_text(message["content"])) for message in prompts.opening)
    turns = []
    for content in prompts.contents:
        turn += len(content_text(content))
        turns.append(turn)
    if not prompts.continuations:
        return sum(turns)
    return sum(len(each.text) + _context_characters(each, turns[0]) for each in prompts.continuations)


def _context_characters(continuation: Continuation, prompt: int) -> int:
    if continuation.rolling:  # such a text has no prompt before it
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
    """the first sample's, if likelihoods are asked for"""
    expected: tuple[int, ...] = ()
    """positions of the right continuations"""
    asked: str | None = None
    """where and how a model is asked"""

    def lines(self) -> Iterator[str]:
        """Yield lines for people."""
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
            yield f"about {taken.tokens:,} tokens to send for {trials}{cost}; {taken.scope}"
        for module in self.installed:
            yield f"identified by version: {module}"
        yield from taken.batch_lines()

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
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
            continuations = prompts.continuations
            if continuations:
                expected = load_reference("holdfast.graders.likelihood:expected_positions")(spec, sample)
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


def print_compiled(planned: Sequence[tuple[RunIdentity, RunDir, Plan]], *, as_json: bool) -> None:
    """Print the compiled eval, the plan of its run, and of the baseline's run if it has a baseline, and its preview."""
    if as_json:
        target, *baseline = [plan_as_json(*each) for each in planned]
        data = {**target, **({"baseline": baseline[0]} if baseline else {})}
        echo_json(msgspec.json.encode(data))
        return
    from ruamel.yaml import YAML

    yaml, text = YAML(), StringIO()
    yaml.dump(_shortened(without_secrets(planned[0][0].spec.document.data)), text)
    console = make_console()
    console.print(text.getvalue().rstrip(), markup=False, soft_wrap=True)
    console.print()
    for (_, rundir, plan), what in zip(planned, ("run", "baseline"), strict=False):
        console.print(f"{what}: {rundir.path}{' (finished)' if rundir.finished else ''}", soft_wrap=True)
        console.print(str(plan), soft_wrap=True)
    for notice in planned[0][0].plan_notices:
        console.print(Text(f"note: {notice}", style="yellow"), soft_wrap=True)
    identity, rundir, plan = planned[0]
    for line in preview(identity, plan, rundir).lines():
        echo(line)


def _shortened(data: dict[str, Any]) -> dict[str, Any]:
    """Return an eval to print: of a benchmark with many tasks, only their number."""
    about = (data.get("metadata") or {}).get("benchmark")
    if not isinstance(about, dict) or len(about.get("tasks") or ()) < 2:
        return data
    shorter = {**about, "tasks": f"{len(about['tasks'])} tasks", "groups": f"{len(about.get('groups') or ())} groups"}
    shorter["dataset"] = list(dict.fromkeys(each["path"] for each in about.get("dataset") or ()))
    return {**data, "metadata": {**data["metadata"], "benchmark": shorter}}


def plan_as_json(identity: RunIdentity, rundir: RunDir, plan: Plan) -> dict[str, Any]:
    """Describe the plan of a run for programs."""
    return {
        "run": str(rundir.path),
        "already_finished": rundir.finished,
        **{name: getattr(plan, name) for name in ("total", "finished", "reused", "to_grade", "to_run", "uncertain")},
        "lenders": dict(plan.lenders),
        "reasons": plan.reasons,
        "notices": identity.plan_notices,
        "preview": preview(identity, plan, rundir).as_dict(),
        "eval": without_secrets(identity.spec.document.data),
    }
