"""Translate a Python regular expression into RE2's syntax, with exactly the verdicts that Python's `re` gives.

RE2 answers in linear time, but its `\\w`, `\\d`, `\\s` and its folding of case differ from Python's. So every set of
characters is written out, and Python's `re` itself says which characters are in it. A pattern gets two forms: one for
ASCII text, which is small, and one for all text, made when first needed.
"""

from __future__ import annotations

import re
from array import array
from functools import cache
from itertools import chain
from re import _constants as sre  # type: ignore[attr-defined]  # Python's own reading of patterns; it has no public name
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final

_ASCII: Final = "".join(map(chr, range(128)))
_LAST: Final = 0x10FFFF
_CATEGORIES: Final = {
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
}
_LAZY: Final = {sre.MAX_REPEAT: "", sre.MIN_REPEAT: "?"}


class NotTranslatable(Exception):
    """RE2 has nothing that gives the same verdict."""


class Translation:
    """A Python pattern in RE2's syntax."""

    def __init__(self, pattern: str, flags: int) -> None:
        self._tree = _parser.parse(pattern, flags)
        self._flags = int(self._tree.state.flags)
        self._everywhere = False
        self._captures = False
        self._groups = 0
        self.boundaries = False
        """`\\b` is used, which RE2 knows between ASCII characters only"""
        self.same_spans = self._tree.getwidth()[0] > 0
        """matches begin and end where Python's do; False where only their presence is certain to agree"""
        self.same_groups = True
        """groups match what Python's do; False where one is repeated, of which the engines may keep different rounds"""
        self.ascii = self._sequence(self._tree, self._flags, last=True)
        """for ASCII text"""

    def form(self, *, everywhere: bool, captures: bool) -> str:
        """Return the form for ASCII text, or for all text, and with groups where they are to be captured."""
        self._everywhere, self._captures = everywhere, captures
        return self._sequence(self._tree, self._flags, last=True)

    def _sequence(self, nodes: Any, flags: int, *, last: bool) -> str:
        end = len(nodes) - 1
        return "".join(
            self._node(kind, value, flags, last=last and number == end) for number, (kind, value) in enumerate(nodes)
        )

    def _node(self, kind: Any, value: Any, flags: int, *, last: bool) -> str:
        if kind in (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY):
            return self._characters(kind, value, flags)
        if kind is sre.AT:
            return self._place(value, flags, last=last)
        if kind is sre.BRANCH:
            return f"(?:{'|'.join(self._sequence(nodes, flags, last=last) for nodes in value[1])})"
        if kind is sre.SUBPATTERN:
            group, added, removed, nodes = value
            if added & (re.ASCII | re.UNICODE):  # of which Python loses sight at the start of a pattern
                raise NotTranslatable("(?a:…)")
            self._groups += group is not None
            opening = "(" if self._captures and group is not None else "(?:"
            return f"{opening}{self._sequence(nodes, (flags | added) & ~removed, last=last)})"
        if kind in _LAZY:
            least, most, nodes = value
            if most > 1 and nodes.getwidth()[0] == 0:
                self.same_spans = False  # what a loop does with a body that matches nothing differs
            count = f"{{{least},}}" if most is sre.MAXREPEAT else f"{{{least},{most}}}"
            before = self._groups
            inner = self._sequence(nodes, flags, last=last and most == 1)
            if most != 1 and self._groups > before:
                self.same_groups = False
            return f"(?:{inner}){count}{_LAZY[kind]}"
        raise NotTranslatable(str(kind))  # look-around, references, atomic groups, possessive repeats, conditions

    def _place(self, place: Any, flags: int, *, last: bool) -> str:
        if place is sre.AT_BEGINNING:
            return "(?m:^)" if flags & re.MULTILINE else r"\A"
        if place is sre.AT_BEGINNING_STRING:
            return r"\A"
        if place is sre.AT_END_STRING:
            return r"\z"
        if place is sre.AT_END:
            if flags & re.MULTILINE:
                return "(?m:$)"
            if last:  # with nothing behind it, the newline that Python's `$` looks at may as well be matched
                self.same_spans = False
                return r"(?:\n?\z)"
        if place is sre.AT_BOUNDARY:
            self.boundaries |= not flags & re.ASCII
            return r"\b"
        raise NotTranslatable(str(place))

    def _characters(self, kind: Any, value: Any, flags: int) -> str:
        if kind is sre.ANY:
            return "(?s:.)" if flags & re.DOTALL else r"[^\n]"
        negated = kind is sre.NOT_LITERAL
        items = list(value) if kind is sre.IN else [(sre.LITERAL, value)]
        if items[0][0] is sre.NEGATE:
            negated, items = True, items[1:]
        flags &= re.IGNORECASE | re.ASCII
        if not self._everywhere:
            ranges = _among(_ASCII, _as_class(items), flags)
        elif flags & re.IGNORECASE:
            literal = items[0][1] if len(items) == 1 and items[0][0] is sre.LITERAL else None
            ranges = _folded(_as_class(items), flags) if literal is None else _cases(literal, flags)
        else:
            ranges = tuple(chain.from_iterable(_ranges(item, argument, flags) for item, argument in items))
        inside = "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in ranges)
        if not inside:
            return "(?s:.)" if negated else rf"[^\x{{0}}-\x{{{_LAST:x}}}]"
        return f"[{'^' if negated else ''}{inside}]"


_Ranges = tuple[tuple[int, int], ...]


def _as_class(items: list[Any]) -> str:
    """Write a set as Python does."""
    parts = []
    for kind, value in items:
        if kind is sre.CATEGORY:
            parts.append(_CATEGORIES[value])
        else:
            first, last = (value, value) if kind is sre.LITERAL else value
            parts.append(rf"\U{first:08x}-\U{last:08x}")
    return f"[{''.join(parts)}]"


def _ranges(kind: Any, value: Any, flags: int) -> _Ranges:
    """Return the characters of one part of a set whose case counts."""
    if kind is sre.CATEGORY:
        return _folded(_CATEGORIES[value], flags)
    return ((value, value),) if kind is sre.LITERAL else (value,)


def _among(characters: str, one: str, flags: int) -> _Ranges:
    """Return those of consecutive characters that a set of characters, in Python's syntax, has in it."""
    return tuple((ord(run[0][0]), ord(run[0][-1])) for run in re.finditer(f"(?:{one})+", characters, flags))


@cache
def _folded(one: str, flags: int) -> _Ranges:
    everything = array("I", chain(range(0xD800), range(0xE000, _LAST + 1)))
    return _among(everything.tobytes().decode("utf-32"), one, flags)


@cache
def _cases(literal: int, flags: int) -> _Ranges:
    """Return all characters that equal one where case is ignored."""
    same = re.compile(rf"\U{literal:08x}", flags)
    return tuple((ord(other), ord(other)) for other in {*same.findall(_cased()), chr(literal)})


@cache
def _cased() -> str:
    """Return all characters that have a case; none is above U+1FFFF."""
    characters = map(chr, chain(range(0xD800), range(0xE000, 0x20000)))
    return "".join(c for c in characters if not c == c.lower() == c.upper())
