"""Properties of `engine.replay`: random conversations, killed at any recorded call, continue from their record."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.canonical import digest
from holdfast.engine.calls import RecordedCalls
from holdfast.engine.replay import Replay
from holdfast.errors import RestartTrial, Uncertain
from holdfast.store.heads import call_id, cut_off_calls
from holdfast.store.records import NO_USAGE, Usage
from holdfast.targets.types import Reading

if TYPE_CHECKING:
    from holdfast.store.records import Step

PENDING: Any = SimpleNamespace(key="k", sample=SimpleNamespace(id="s"), trial=1)


RULES: list[tuple[Literal["record", "never"], Literal["stop", "error_result", "restart"]]] = [
    ("record", "stop"),
    ("never", "stop"),
    ("never", "error_result"),
    ("never", "restart"),
]
"""policies of the tools, by their numbers"""


class Call(NamedTuple):
    """A call that the scripted agent makes."""

    kind: Literal["model", "tool"]
    request: int

    @property
    def identity(self) -> tuple[str, str]:
        """Kind and request as the record has them."""
        return self.kind, digest({"ask": self.request} if self.kind == "model" else [f"tool{self.request}", {}])


Turn = list[list[Call]]
"""groups of calls that are made at the same time"""


class Kill(NamedTuple):
    """The moment at which a process is killed: while it writes this record, which survives or does not."""

    writes: int
    survives: bool


class Killed(BaseException):
    pass


class Process:
    """One process of a trial: makes the calls of the conversation, and may be killed at one of its records."""

    def __init__(
        self, conversation: list[Turn], disk: list[Step], kill: Kill | None, world: set[str] | None = None
    ) -> None:
        self.conversation = conversation
        self.disk = disk
        self.world = set() if world is None else world
        """ids of the calls that happened and must not happen again"""
        self.kill = kill
        self.written = 0
        self.executed: Counter[tuple[int, str, str]] = Counter()
        self.replay = Replay(PENDING, self, self.since_restart(), lambda _: None)  # type: ignore[arg-type]
        self.on_disk_at_start = self.calls_on_disk()

    def since_restart(self) -> list[Step]:
        """The records that count, as `read_steps` returns them."""
        counted: list[Step] = []
        for step in self.disk:
            if step.kind == "restart":
                counted.clear()
            elif step.kind == "settle":
                counted = [each for each in counted if each.kind != "intent" or call_of(each) != call_of(step)]
            else:
                counted.append(step)
        return counted

    def settle(self) -> None:
        """Write what a person says who looks at the world, as `engine.settlement` does."""
        for intent in cut_off_calls(self.since_restart()):
            response = {**intent.response, "result": "settled", "settled": "happened"}
            happened = call_id(*call_of(intent)) in self.world
            self.disk.append(replace(intent, kind="tool" if happened else "settle", response=response))

    def calls_on_disk(self) -> Counter[tuple[int, str, str]]:
        return Counter((step.turn, step.kind, step.request) for step in self.since_restart())

    async def step(self, record: Step) -> None:
        """Stand in for `Recorder.step`."""
        if self.kill is not None and self.written >= self.kill.writes:
            if self.written == self.kill.writes and self.kill.survives:
                self.disk.append(record)
            self.written += 1
            raise Killed
        await asyncio.sleep(0)  # other calls go on while this one waits for the disk
        self.written += 1
        self.disk.append(record)

    async def run(self) -> list[Any] | None:
        """Have the conversation as `engine.trial` does; return its replies, or None if it is uncertain."""
        while True:
            try:
                return [await self.ask(number, turn) for number, turn in enumerate(self.conversation, 1)]
            except Uncertain:
                self.settle()
                return None
            except RestartTrial:
                await self.replay.restart()
                self.executed.clear()
                self.on_disk_at_start.clear()

    async def ask(self, number: int, turn: Turn) -> Any:
        key = (number, "turn", digest(number), 1)
        if (step := self.replay.take(key)) is not None:
            response = step.response
        else:
            call = self.replay.begin_call(key)
            calls = await RecordedCalls.begin(self.replay, number)
            response = [await self.make_at_once(calls, number, group) for group in turn]
            calls.end()
            await self.replay.end_call(call, response, NO_USAGE)
        self.replay.end_turn(number)
        return response

    async def make_at_once(self, calls: RecordedCalls, turn: int, group: list[Call]) -> list[Any]:
        tasks = [asyncio.create_task(self.make(calls, turn, call)) for call in group]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def make(self, calls: RecordedCalls, turn: int, call: Call) -> Any:
        policy, on_cut_off = RULES[call.request] if call.kind == "tool" else RULES[0]

        async def live(identity_of_call: str) -> str:
            if policy == "never" and on_cut_off != "restart":
                assert identity_of_call not in self.world, "happened twice"
                self.world.add(identity_of_call)
            identity = (turn, *call.identity)
            self.executed[identity] += 1
            in_script = sum(each.identity == call.identity for group in self.conversation[turn - 1] for each in group)
            assert self.executed[identity] + self.on_disk_at_start[identity] <= in_script, "made again"
            if policy == "never":
                intents = self.on_disk_at_start[turn, "intent", call.identity[1]]
                assert self.executed[identity] + intents <= in_script, "made again after it was cut off"
            await asyncio.sleep(0)
            return f"{call.request} {len(self.disk)} {self.executed[identity]}"

        if call.kind == "model":
            result = await calls.model({"ask": call.request}, lambda: live(""), Reading(usage=lambda _: Usage()))
        else:
            result = await calls.tool(f"tool{call.request}", {}, live, policy, on_cut_off=on_cut_off)
        responses = [
            step.response if call.kind == "model" else step.response["result"]
            for step in self.since_restart()
            if (step.turn, step.kind, step.request) == (turn, *call.identity)
        ]
        assert result in responses, "used before it was on disk"
        return result


def call_of(step: Step) -> tuple[str, int, str, int]:
    return step.key, step.turn, step.request, step.nth


def run_process(
    conversation: list[Turn], disk: list[Step], kill: Kill | None = None, world: set[str] | None = None
) -> tuple[list[Any] | None, int]:
    """Run a process until it ends, stops or is killed; return its replies, and how many calls it made."""
    process = Process(conversation, disk, kill, world)
    try:
        replies = asyncio.run(process.run())
    except Killed:
        replies = None
    return replies, sum(process.executed.values())


calls = st.one_of(
    st.builds(Call, st.just("model"), st.integers(0, 2)),
    st.builds(Call, st.just("tool"), st.integers(0, 3)),
)
conversations = st.lists(st.lists(st.lists(calls, min_size=1, max_size=3), max_size=3), min_size=1, max_size=3)
kills = st.lists(st.builds(Kill, st.integers(0, 12), st.booleans()), max_size=4)


@given(conversations, kills)
def test_a_recorded_call_is_never_made_again_and_keeps_its_result(conversation: list[Turn], kills: list[Kill]) -> None:
    disk, world = killed(conversation, kills)
    replies, _ = run_process(conversation, disk, None, world)
    assert replies is not None
    assert run_process(conversation, disk, None, world) == (replies, 0)


def killed(conversation: list[Turn], kills: list[Kill]) -> tuple[list[Step], set[str]]:
    """Kill a process at each of these moments, and settle what is uncertain after the last."""
    disk: list[Step] = []
    world: set[str] = set()
    for kill in kills:
        run_process(conversation, disk, kill, world)
    Process(conversation, disk, None, world).settle()
    return disk, world


@given(conversations, kills)
def test_the_record_is_in_the_order_of_the_conversation(conversation: list[Turn], kills: list[Kill]) -> None:
    disk, world = killed(conversation, kills)
    run_process(conversation, disk, None, world)
    steps = [step for step in Process(conversation, disk, None).since_restart() if step.kind != "intent"]
    for number, turn in enumerate(conversation, 1):
        for group in turn:
            inside, steps = steps[: len(group)], steps[len(group) :]
            assert Counter((step.kind, step.request) for step in inside) == Counter(call.identity for call in group)
            assert {step.turn for step in inside} == {number}
        assert (steps[0].turn, steps[0].kind) == (number, "turn")
        steps = steps[1:]
    assert steps == []


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_a_conversation_that_diverges_uses_no_record_from_there_on(before: list[int], after: list[int]) -> None:
    """The record answers until the first new call; the recorded calls that it skipped are dropped."""

    async def make(requests: list[int], disk: list[Step], answer: str) -> list[str]:
        process = Process([], disk, None)
        attempt = await RecordedCalls.begin(process.replay, 1)

        async def live() -> str:
            return answer

        return [await attempt.model({"ask": request}, live, Reading(usage=lambda _: Usage())) for request in requests]

    disk: list[Step] = []
    asyncio.run(make(before, disk, "recorded"))
    unused = Counter(before)
    numbers: Counter[int] = Counter()
    expected = []
    for request in after:
        numbers[request] += 1
        if unused and numbers[request] <= Counter(before)[request]:
            expected.append("recorded")
            unused -= Counter([request])
        else:
            expected.append("live")
            unused.clear()
    assert asyncio.run(make(after, disk, "live")) == expected
