"""The filter language: words that say which trials to show.

    failed                      status of the trial: passed, failed, error, skipped, pending, ungraded
    correct:failed              status that a grader gave, here the grader `correct`
    checkpoint@2:failed         status of the checkpoint after turn 2, over its graders
    judge<0.5  seconds>30       a grader's score, or a number of the trial, with < <= = != >= >
    answer=cut                  class of the answer: whole, cut, filtered, refused, empty, paused, limited, exited
    stop=length  error=timeout  reason why the conversation ended; kind of the error
    sample=a17  tag.level=hard  a field of the row
    stopped  reused             a checkpoint ended the conversation; the output was copied from another run
    "exact words"  word         text of the transcript, or of the sample's id, ignoring case
    -failed  -word              the opposite
    failed or error             either; terms side by side must all hold; ( ) group

`parse_query` knows only the grammar; `snapshot` looks up the names of the run's graders and fields.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.errors import QueryError
from holdfast.report.trial_table import STATUSES

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAGS: Final = ("stopped", "reused")
_WORDS: Final = (*STATUSES, *FLAGS)
_MOST: Final = 4_000
"""maximum number of characters in a query"""
_DEEPEST: Final = 50
"""maximum depth of nested parentheses and minus signs"""
_QUOTED: Final = r'"(?:[^"\\]|\\.)*"'
_TOKEN: Final = re.compile(
    rf"""(?P<space>\s+)
       | (?P<open>\()
       | (?P<close>\))
       | (?P<minus>-(?=[^\s)]))
       | (?P<name>{_QUOTED}|(?:[^\s()"<>=:!]|!(?!=))+)
         (?:(?P<operator><=|>=|!=|<|>|=|:)(?P<value>{_QUOTED}|[^\s()"]*))?""",
    re.VERBOSE | re.DOTALL,
)


class HasStatus(NamedTuple):
    """The trial has a status, or with a name, the grader or checkpoint gave this status."""

    name: str
    status: str
    position: int


class HasFlag(NamedTuple):
    """The trial was stopped, or reused."""

    flag: str


class Compares(NamedTuple):
    """A number or a field is compared with a value."""

    name: str
    operator: str
    value: str
    position: int


class Contains(NamedTuple):
    """The transcript or the sample's id contains a text."""

    text: str


class Every(NamedTuple):
    """All conditions hold."""

    conditions: tuple[Condition, ...]


class Some(NamedTuple):
    """One of the conditions holds."""

    conditions: tuple[Condition, ...]


class Not(NamedTuple):
    """A condition does not hold."""

    condition: Condition


Condition = HasStatus | HasFlag | Compares | Contains | Every | Some | Not


class Query(NamedTuple):
    """A parsed query."""

    text: str
    """as it was written"""
    condition: Condition

    @property
    def texts(self) -> list[str]:
        """Texts that are searched for in transcripts."""
        return [leaf.text for leaf in _leaves(self.condition) if isinstance(leaf, Contains)]

    @property
    def comparisons(self) -> list[Compares]:
        """Comparisons of numbers, graders' scores and fields with values."""
        return [leaf for leaf in _leaves(self.condition) if isinstance(leaf, Compares)]


def _leaves(condition: Condition) -> Iterator[Condition]:
    if isinstance(condition, Every | Some):
        for part in condition.conditions:
            yield from _leaves(part)
    elif isinstance(condition, Not):
        yield from _leaves(condition.condition)
    else:
        yield condition


def parse_query(text: str) -> Query:
    """Parse a query; an empty query selects everything. Raises QueryError with the position of a mistake."""
    if len(text) > _MOST:
        raise QueryError(f"the filter has {len(text):,} characters, at most {_MOST:,} are allowed", _MOST)
    parser = _Parser(text)
    condition = parser.alternatives(0)
    if parser.token is not None:
        raise QueryError("`)` without `(`", parser.token.start(), "Remove it, or put text that contains it in quotes.")
    return Query(text, condition)


class _Parser:
    """Reads one token after the other."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self.token: re.Match[str] | None = None
        self._advance()

    def _advance(self) -> None:
        while self._position < len(self._text):
            match = _TOKEN.match(self._text, self._position)
            if match is None:
                raise self._unreadable()
            self._position = match.end()
            if match.lastgroup != "space":
                self.token = match
                return
        self.token = None

    def _unreadable(self) -> QueryError:
        position = self._position
        if self._text[position] == '"':
            return QueryError("a quotation mark is not closed", position, 'Close it, or write a quotation mark as \\".')
        return QueryError(
            f"`{self._text[position]}` needs a name before it", position, "Write for example `seconds>30`."
        )

    def alternatives(self, depth: int) -> Condition:
        """Read terms joined by `or`."""
        parts = [self._together(depth)]
        while self._is_word("or"):
            self._advance()
            if self._at_end():
                raise QueryError("`or` needs a condition after it", len(self._text), "Write `failed or error`.")
            parts.append(self._together(depth))
        return parts[0] if len(parts) == 1 else Some(tuple(parts))

    def _together(self, depth: int) -> Condition:
        parts = []
        while not self._at_end() and not self._is_word("or"):
            parts.append(self._term(depth))
        if not parts and self._is_word("or") and self.token is not None:
            position = self.token.start()
            raise QueryError("`or` needs a condition before it", position, 'Write `failed or error`, or `"or"`.')
        return parts[0] if len(parts) == 1 else Every(tuple(parts))

    def _at_end(self) -> bool:
        return self.token is None or self.token["close"] is not None

    def _is_word(self, word: str) -> bool:
        return self.token is not None and self.token["name"] == word and self.token["operator"] is None

    def _term(self, depth: int) -> Condition:
        token = self.token
        assert token is not None
        position = token.start()
        if depth > _DEEPEST:
            raise QueryError("too many parentheses or minus signs inside each other", position)
        self._advance()
        if token["minus"]:
            return Not(self._term(depth + 1))
        if token["open"]:
            condition = self.alternatives(depth + 1)
            if self.token is None:
                raise QueryError("`(` is not closed", position, "Add `)`, or put text that contains it in quotes.")
            self._advance()
            return condition
        return _leaf(token)


def _leaf(token: re.Match[str]) -> Condition:
    name, operator, value = _unquoted(token["name"]), token["operator"], token["value"]
    position = token.start()
    if operator is None:
        if not name:
            raise QueryError("the text in quotes is empty", position, "Write the words to look for between the quotes.")
        if token["name"] in STATUSES:
            return HasStatus("", name, position)
        return HasFlag(name) if token["name"] in FLAGS else Contains(name)
    value = _unquoted(value)
    if not value:
        remedy = "Write a value without a space before it, for example `seconds>30` or `correct:failed`."
        raise QueryError(f"`{name}{operator}` needs a value after it", token.end(), remedy)
    if operator == ":":
        if value not in STATUSES:
            remedy = f"Statuses are {', '.join(STATUSES)}. Fields take `=`, as in `{name}={value}`; texts take quotes."
            raise QueryError(f"`{value}` is not a status", token.start("value"), remedy)
        return HasStatus("" if name == "status" else name, value, position)
    return Compares(name, operator, value, position)


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL) if text.startswith('"') else text


def quote(text: str) -> str:
    """Return a name or value as it is written in a query."""
    if text and not re.search(r'[\s()"<>=:!\\]', text) and text[0] != "-" and text not in ("or", *_WORDS):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
