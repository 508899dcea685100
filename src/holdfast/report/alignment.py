"""Two conversations about one sample side by side, aligned turn by turn, message by message and call by call.

Within a turn, messages and tool calls that are equal in both are the anchors. Items between two anchors are paired if
they are of one kind: messages of one role, calls of one tool. In texts that differ, the words are compared.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.report.chat import ChatMessage, ToolUse
    from holdfast.report.timeline import CheckpointBand, GraderVerdict, Timeline, TimelineFacts, TimelineTurn

MOST_TEXT: Final = 20_000
"""characters of a text whose words are compared"""
_MOST_WORDS: Final = 3_000
"""words of a text up to which words are compared; in longer texts, lines are"""
_MANY_ITEMS: Final = 500
"""messages and calls of a turn beyond which they are paired in order, without comparing all of them"""
_WORD: Final = re.compile(r"\s*(?:\w+|[^\w\s])|\s+")
_LINE: Final = re.compile(r"[^\n]*\n|[^\n]+")


class TextPiece(Struct, frozen=True, kw_only=True):
    """A part of a text: in both conversations, or only in this one."""

    text: str
    shared: bool


class AlignedItem(Struct, frozen=True, kw_only=True):
    """A message or a tool call of one conversation."""

    kind: Literal["message", "call"]
    label: str
    """role of a message, name of a tool"""
    number: int
    """of the message"""
    pieces: list[TextPiece]
    """the text; arguments of a call"""
    result: list[TextPiece] | None = None
    """of a call, if known"""


class AlignedRow(Struct, frozen=True, kw_only=True):
    """A message or call of both conversations, or of one of them."""

    first: AlignedItem | None
    second: AlignedItem | None
    same: bool


class AlignedTurn(Struct, frozen=True, kw_only=True):
    """A turn of both conversations, and the checkpoints after it."""

    number: int
    """0: before the first turn"""
    states: list[str]
    """of the turn in each conversation; empty if it has no such turn"""
    rows: list[AlignedRow]
    checkpoints: list[CheckpointBand | None]

    @property
    def note(self) -> str:
        """Say in which conversation the turn was never asked."""
        asked = [state not in ("", "not_asked") for state in self.states]
        if all(asked) or not self.number:
            return ""
        return "was never asked" if not any(asked) else f"was asked only in the {'first' if asked[0] else 'second'}"


class AlignedVerdict(Struct, frozen=True, kw_only=True):
    """A grader's verdicts on both conversations."""

    name: str
    verdicts: list[GraderVerdict | None]


class SideBySide(Struct, frozen=True, kw_only=True):
    """Two trials of one sample."""

    sample: str
    trial: int
    runs: list[str]
    targets: list[str]
    facts: list[TimelineFacts]
    turns: list[AlignedTurn]
    graders: list[AlignedVerdict]
    """at the end of the conversations"""
    differs_at: tuple[int, int] | None
    """turn, and row of the turn from 0, of the first difference; None if both say the same"""


class _Item(NamedTuple):
    kind: Literal["message", "call"]
    label: str
    text: str
    number: int
    result: str | None = None

    @property
    def sort(self) -> tuple[str, str]:
        """Kind and label, which two items must share to be paired."""
        return self.kind, self.label

    @property
    def content(self) -> tuple[str, str, str, str | None]:
        """Everything but the number."""
        return self.kind, self.label, self.text, self.result


def align(first: Timeline, second: Timeline) -> SideBySide:
    """Put two timelines of one sample side by side."""
    turns = [_turn(0, None, None, list(_messages(first.opening)), list(_messages(second.opening)))]
    ours, theirs = ({turn.number: turn for turn in timeline.turns} for timeline in (first, second))
    for number in sorted({*ours, *theirs}):
        left, right = ours.get(number), theirs.get(number)
        turns.append(_turn(number, left, right, list(_items(left)), list(_items(right))))
    verdicts = [{verdict.name: verdict for verdict in timeline.graders} for timeline in (first, second)]
    return SideBySide(
        sample=first.sample,
        trial=first.trial,
        runs=[first.run, second.run],
        targets=[first.target, second.target],
        facts=[first.facts, second.facts],
        turns=[turn for turn in turns if turn.rows or any(turn.checkpoints)],
        graders=[
            AlignedVerdict(name=name, verdicts=[side.get(name) for side in verdicts])
            for name in dict.fromkeys(name for side in verdicts for name in side)
        ],
        differs_at=next(
            ((turn.number, place) for turn in turns for place, row in enumerate(turn.rows) if not row.same), None
        ),
    )


def _turn(
    number: int, left: TimelineTurn | None, right: TimelineTurn | None, ours: Sequence[_Item], theirs: Sequence[_Item]
) -> AlignedTurn:
    return AlignedTurn(
        number=number,
        states=["" if turn is None else turn.state for turn in (left, right)],
        rows=[_row(*pair) for pair in _pair_items(ours, theirs)],
        checkpoints=[None if turn is None else turn.checkpoint for turn in (left, right)],
    )


def _items(turn: TimelineTurn | None) -> Iterator[_Item]:
    if turn is not None:
        yield from _messages(turn.messages)
        yield from (_call(use, 0) for use in turn.listed)


def _messages(messages: Sequence[ChatMessage]) -> Iterator[_Item]:
    for message in messages:
        images = [f"[image {image.address[:100]}]" for image in message.images]
        text = "\n".join(part for part in (message.text, *images) if part)
        if text or not message.calls:
            yield _Item("message", message.role, text, message.number)
        yield from (_call(use, message.number) for use in message.calls)


def _call(use: ToolUse, number: int) -> _Item:
    return _Item("call", use.name, use.arguments, number, use.result)


def _pair_items(ours: Sequence[_Item], theirs: Sequence[_Item]) -> Iterator[tuple[_Item | None, _Item | None]]:
    """Pair the items of a turn: equal items by the longest common subsequence, and between them items of one sort."""
    many = max(len(ours), len(theirs)) > _MANY_ITEMS
    for same, left, right in _match([item.content for item in ours], [item.content for item in theirs], quickly=many):
        if same:
            yield from ((ours[i], theirs[j]) for i, j in zip(left, right, strict=True))
            continue
        sorts = [[items[i].sort for i in block] for items, block in ((ours, left), (theirs, right))]
        for alike, i_block, j_block in _match(*sorts, quickly=many):
            if alike:
                yield from ((ours[left[i]], theirs[right[j]]) for i, j in zip(i_block, j_block, strict=True))
            else:
                yield from ((ours[left[i]], None) for i in i_block)
                yield from ((None, theirs[right[j]]) for j in j_block)


def _match(
    ours: Sequence[object], theirs: Sequence[object], *, quickly: bool = False
) -> Iterator[tuple[bool, range, range]]:
    """Yield blocks of two sequences in order: equal ones, and what lies between them.

    `quickly` does not begin a block with an element that is very frequent. Without that, a text that repeats one word
    takes minutes.
    """
    matcher = SequenceMatcher(None, ours, theirs, autojunk=quickly)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        yield tag == "equal", range(i, i_end), range(j, j_end)


def _row(left: _Item | None, right: _Item | None) -> AlignedRow:
    texts = compare_texts("" if left is None else left.text, "" if right is None else right.text)
    results = compare_texts((left and left.result) or "", (right and right.result) or "")
    items = [
        None
        if item is None
        else AlignedItem(
            kind=item.kind,
            label=item.label,
            number=item.number,
            pieces=texts[side],
            result=None if item.result is None else results[side],
        )
        for side, item in enumerate((left, right))
    ]
    same = left is not None and right is not None and left.content == right.content
    return AlignedRow(first=items[0], second=items[1], same=same)


def compare_texts(first: str, second: str) -> tuple[list[TextPiece], list[TextPiece]]:
    """Divide two texts into shared parts and parts of only one of them, by words; long texts by lines.

    If one of them is empty, or longer than `MOST_TEXT`, each is one piece.
    """
    if first == second or not first or not second or max(len(first), len(second)) > MOST_TEXT:
        return _whole(first, shared=first == second), _whole(second, shared=first == second)
    ours, theirs = _WORD.findall(first), _WORD.findall(second)
    if max(len(ours), len(theirs)) > _MOST_WORDS:
        ours, theirs = _LINE.findall(first), _LINE.findall(second)
    sides: tuple[list[TextPiece], list[TextPiece]] = ([], [])
    for same, left, right in _match(ours, theirs, quickly=True):
        for pieces, tokens, block in ((sides[0], ours, left), (sides[1], theirs, right)):
            if block:
                pieces.append(TextPiece(text="".join(tokens[block.start : block.stop]), shared=same))
    return sides


def _whole(text: str, *, shared: bool) -> list[TextPiece]:
    return [TextPiece(text=text, shared=shared)] if text else []
