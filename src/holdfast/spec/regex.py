"""Regular expressions as users write them, matched so that none can freeze a run.

Most patterns are matched by RE2, whose time grows linearly with the text. Patterns that RE2 cannot match (look-around,
back-references) are matched by Python's `re`, and only in a process that can be killed: see `slow`.

A pattern has Python's meaning if Python can read it: `Translation` writes it for RE2 without changing a verdict. Syntax
that only RE2 has (`[[:alpha:]]`, `\\pL`, `\\z`, `\\Q…\\E`, flags in the middle) has RE2's meaning. With the dialect
`re2`, which evals of Go programs have, RE2's reading goes first.
"""

from __future__ import annotations

import re
import time
import warnings
from array import array
from contextvars import ContextVar
from functools import cache, cached_property, lru_cache
from itertools import chain
from re import _constants as sre  # type: ignore[attr-defined]  # Python's own reading of patterns; it has no public name
from re import _parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from re import Pattern

Dialect = Literal["python", "re2"]
Operation = Literal["search", "last_end", "count", "find", "remove"]

_POSIX_CLASS: Final = re.compile(r"\[\^?\[:\^?\w+:\]")
_NON_ASCII_WORD: Final = re.compile(r"[^\W\x00-\x7f]")
_MEMORY: Final = 32 << 20
"""bytes that RE2 may use for one pattern"""
_STEPS: Final = 20_000_000
"""size of the pattern times length of the text: about 0.2 s in the worst case"""
MATCH_SECONDS: Final = 5.0
"""time limit of a match in another process"""
_SECONDS: Final = 0.1
"""time limit of all matches of a pattern in a text, if each is fast"""

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


class Request(Protocol):
    """A piece of work: a NamedTuple of JSON values."""

    def _asdict(self) -> dict[str, Any]: ...

    def __hash__(self) -> int: ...

    @property
    def seconds(self) -> float:
        """Time limit."""
        ...

    @property
    def too_slow(self) -> str:
        """Error message for work that takes longer."""
        ...

    def work(self) -> Any:
        """Return the answer, however long it takes: for a process that may be killed."""
        ...


class Slow(Exception):
    """Raised by code that needs an answer from another process."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"{type(request).__name__} needs another process")
        self.request = request


ANSWERS: ContextVar[dict[Request, Any] | None] = ContextVar("ANSWERS", default=None)
"""the answers of other processes so far, for the running code"""


def answer_to(request: Request) -> Any:
    """Return the answer to a request, or raise Slow."""
    answers = ANSWERS.get()
    if answers is None or request not in answers:
        raise Slow(request)
    return answers[request]


class Match(NamedTuple):
    """A match to be made in another process."""

    source: str
    ignore_case: bool
    dialect: Dialect
    operation: Operation
    text: str
    number: int = 0
    """number of the match to find"""

    @property
    def seconds(self) -> float:
        """Time limit."""
        return MATCH_SECONDS

    @property
    def too_slow(self) -> str:
        """Error message for a match that takes longer."""
        return f"the pattern took longer than {self.seconds:g} s: {self.source!r}"

    def work(self) -> Any:
        """Make the match, however long it takes: for a process that may be killed."""
        pattern = compile_regex(self.source, ignore_case=self.ignore_case, dialect=self.dialect)
        return pattern.match_to_the_end(self.operation, self.text, self.number)


class Regex:
    """A regular expression, with the engine that matches it."""

    def __init__(self, source: str, *, ignore_case: bool, dialect: Dialect) -> None:
        self.pattern = source
        self._ignore_case = ignore_case
        self._dialect: Dialect = dialect
        self._python: Pattern[str] | None = None
        self._translation: Translation | None = None
        self._ascii: Any = None
        """the engine for ASCII text; None if RE2 cannot match the pattern"""
        self._capturing: dict[bool, Any] = {}
        """engines with groups, for ASCII text and for all text, made when first needed"""
        readings = (self._read_as_re2, self._read_as_python)
        problems = []
        for read in readings if dialect == "re2" else reversed(readings):
            problem = read()
            if problem is None:
                break
            problems.append(problem)
        else:
            raise ValueError(f"not a regular expression: {source!r} ({'; '.join(problems)})")

    def search(self, text: str) -> bool:
        """Return True if the pattern matches somewhere in a text."""
        return self._ask("search", text) is not None

    def last_end(self, text: str) -> int | None:
        """Return the end of the last match; None without a match."""
        end: int | None = self._ask("last_end", text)
        return end

    def count(self, text: str) -> int:
        """Return the number of matches."""
        return int(self._ask("count", text))

    def find(self, text: str, number: int) -> tuple[str, ...] | None:
        """Return the groups of the match with this number, or the whole match if the pattern has no groups.

        Matches are numbered from 0, and from the end with negative numbers. A group that takes no part is an empty
        text. Returns None if there is no such match.
        """
        groups = self._ask("find", text, number)
        return None if groups is None else tuple(groups)

    def remove(self, text: str) -> str:
        """Return a text without all matches."""
        return str(self._ask("remove", text))

    def match_to_the_end(self, operation: Operation, text: str, number: int = 0) -> Any:
        """Make a match, however long it takes."""
        engine = self._engine(operation, text)
        return _answer(self._python if engine is None else engine, operation, text, number)

    def _ask(self, operation: Operation, text: str, number: int = 0) -> Any:
        engine = self._engine(operation, text)
        if engine is not None and self._ascii.programsize * len(text) <= _STEPS:
            try:
                return _answer(engine, operation, text, number, time.monotonic() + _SECONDS)
            except TimeoutError:
                pass
        return answer_to(Match(self.pattern, self._ignore_case, self._dialect, operation, text, number))

    def _engine(self, operation: Operation, text: str) -> Any:
        """Return RE2's form of the pattern; None if RE2 could differ from Python's `re`."""
        translation = self._translation
        if self._ascii is None:
            return None
        if translation is None:
            return self._with_groups(everywhere=False) if operation == "find" else self._ascii
        if operation != "search" and not translation.same_spans:
            return None
        if operation == "find" and not translation.same_groups:
            return None
        if not text.isascii() and (_has_surrogates(text) or (translation.boundaries and _NON_ASCII_WORD.search(text))):
            return None
        if operation == "find":
            return self._with_groups(everywhere=not text.isascii())
        return self._ascii if text.isascii() else self._everywhere

    @cached_property
    def _everywhere(self) -> Any:
        assert self._translation is not None
        return _re2(self._translation.form(everywhere=True, captures=False))

    def _with_groups(self, *, everywhere: bool) -> Any:
        if everywhere not in self._capturing:
            if self._translation is None:
                engine = compile_re2(self.pattern, case_sensitive=not self._ignore_case, captures=True)
            else:
                engine = _re2(self._translation.form(everywhere=everywhere, captures=True), captures=True)
            self._capturing[everywhere] = engine
        return self._capturing[everywhere]

    def _read_as_python(self) -> str | None:
        if _POSIX_CLASS.search(self.pattern):
            return "Python has no [[:alpha:]]"
        flags = re.IGNORECASE if self._ignore_case else 0
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # about nested sets
            try:
                self._python = re.compile(self.pattern, flags)
            except (re.error, OverflowError, RecursionError) as error:
                return str(error)
            try:
                self._translation = Translation(self.pattern, flags)
                self._ascii = _re2(self._translation.ascii)
            except (NotTranslatable, RecursionError):
                self._translation = self._ascii = None
        return None

    def _read_as_re2(self) -> str | None:
        try:
            self._ascii = compile_re2(self.pattern, case_sensitive=not self._ignore_case)
        except ValueError as error:
            return f"RE2: {error}"
        return None


@lru_cache(maxsize=4096)
def compile_regex(source: str, *, ignore_case: bool = False, dialect: Dialect = "python") -> Regex:
    """Compile a pattern; raises ValueError, with the pattern, if it is invalid."""
    return Regex(source, ignore_case=ignore_case, dialect=dialect)


def _re2(pattern: str, *, captures: bool = False) -> Any:
    """Compile a translation; None if it is too large for RE2, such as `(a{500}){500}`."""
    try:
        return compile_re2(pattern, captures=captures)
    except ValueError:
        return None


def compile_re2(pattern: str, *, case_sensitive: bool = True, captures: bool = False) -> Any:
    """Compile a pattern in RE2's own syntax; raise ValueError if it is invalid or too large."""
    import re2  # type: ignore[import-untyped]

    options = re2.Options()
    options.max_mem, options.log_errors, options.never_capture = _MEMORY, False, not captures
    options.case_sensitive = case_sensitive
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0]
        raise ValueError(reason.decode(errors="replace") if isinstance(reason, bytes) else reason) from error


def _answer(engine: Any, operation: Operation, text: str, number: int, deadline: float | None = None) -> Any:
    if _has_surrogates(text) and not isinstance(engine, re.Pattern):
        text = text.encode(errors="replace").decode()  # lone surrogates have no UTF-8 form
    if operation == "search":
        match = engine.search(text)
        return None if match is None else match.end()
    matches = []
    for match in engine.finditer(text):
        matches.append(match)
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
    if operation == "last_end":
        return matches[-1].end() if matches else None
    if operation == "count":
        return len(matches)
    if operation == "find":
        if not -len(matches) <= number < len(matches):
            return None
        return matches[number].groups("") or (matches[number].group(),)
    starts = [0, *(match.end() for match in matches)]
    ends = [*(match.start() for match in matches), len(text)]
    return "".join(text[start:end] for start, end in zip(starts, ends, strict=True))


def _has_surrogates(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


class NotTranslatable(Exception):
    """RE2 has no form with the same verdicts."""


class Translation:
    """A Python pattern in RE2's syntax, with exactly the verdicts that Python's `re` gives.

    RE2 answers in linear time, but its `\\w`, `\\d`, `\\s` and its folding of case differ from Python's. So every set
    of characters is written out, and Python's `re` itself says which characters are in it. A pattern gets two forms:
    one for ASCII text, which is small, and one for all text, made when first needed.
    """

    def __init__(self, pattern: str, flags: int) -> None:
        self._tree = _parser.parse(pattern, flags)
        self._flags = int(self._tree.state.flags)
        self._everywhere = False
        self._captures = False
        self._groups = 0
        self.boundaries = False
        """the pattern has `\\b`, which RE2 knows only between ASCII characters"""
        self.same_spans = self._tree.getwidth()[0] > 0
        """matches begin and end where Python's do; False if only their presence is certain to agree"""
        self.same_groups = True
        """groups match what Python's do; False if a group is repeated, since the engines may keep different rounds"""
        self.ascii = self._sequence(self._tree, self._flags, last=True)
        """the form for ASCII text"""

    def form(self, *, everywhere: bool, captures: bool) -> str:
        """Return the form for ASCII text or for all text, with or without captured groups."""
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
            if added & (re.ASCII | re.UNICODE):  # Python loses them at the start of a pattern
                raise NotTranslatable("(?a:…)")
            self._groups += group is not None
            opening = "(" if self._captures and group is not None else "(?:"
            return f"{opening}{self._sequence(nodes, (flags | added) & ~removed, last=last)})"
        if kind in _LAZY:
            least, most, nodes = value
            if most > 1 and nodes.getwidth()[0] == 0:
                self.same_spans = False  # the engines differ on a loop whose body matches nothing
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
            if last:  # at the end, the newline before which Python's `$` matches may be part of the match
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
    """Write a set in Python's syntax."""
    parts = []
    for kind, value in items:
        if kind is sre.CATEGORY:
            parts.append(_CATEGORIES[value])
        else:
            first, last = (value, value) if kind is sre.LITERAL else value
            parts.append(rf"\U{first:08x}-\U{last:08x}")
    return f"[{''.join(parts)}]"


def _ranges(kind: Any, value: Any, flags: int) -> _Ranges:
    """Return the characters of one part of a case-sensitive set."""
    if kind is sre.CATEGORY:
        return _folded(_CATEGORIES[value], flags)
    return ((value, value),) if kind is sre.LITERAL else (value,)


def _among(characters: str, one: str, flags: int) -> _Ranges:
    """Return which of consecutive characters a set, in Python's syntax, contains."""
    return tuple((ord(run[0][0]), ord(run[0][-1])) for run in re.finditer(f"(?:{one})+", characters, flags))


@cache
def _folded(one: str, flags: int) -> _Ranges:
    everything = array("I", chain(range(0xD800), range(0xE000, _LAST + 1)))
    return _among(everything.tobytes().decode("utf-32"), one, flags)


@cache
def _cases(literal: int, flags: int) -> _Ranges:
    """Return all characters that equal a character if case is ignored."""
    same = re.compile(rf"\U{literal:08x}", flags)
    return tuple((ord(other), ord(other)) for other in {*same.findall(_cased()), chr(literal)})


@cache
def _cased() -> str:
    """Return all characters that have a case; none is above U+1FFFF."""
    characters = map(chr, chain(range(0xD800), range(0xE000, 0x20000)))
    return "".join(c for c in characters if not c == c.lower() == c.upper())
