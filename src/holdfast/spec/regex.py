"""Regular expressions as users write them, matched so that none can freeze a run.

Most patterns are matched by RE2, whose time grows linearly with the text. Those that RE2 lacks (look-around,
back-references) are matched by Python's `re`, and only in a process that can be killed: see `slow`.

A pattern has Python's meaning wherever Python can read it: `re2_syntax` translates it without changing a verdict. What
only RE2 can read (`[[:alpha:]]`, `\\pL`, `\\z`, `\\Q…\\E`, flags in the middle) has RE2's meaning. With the dialect
`re2`, which evals of Go programs have, RE2's reading goes first.
"""

from __future__ import annotations

import re
import time
import warnings
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from holdfast.spec.slow import answer_to

if TYPE_CHECKING:
    from re import Pattern

    from holdfast.spec.re2_syntax import Translation

Dialect = Literal["python", "re2"]
Operation = Literal["search", "last_end", "count", "find", "remove"]

_POSIX_CLASS: Final = re.compile(r"\[\^?\[:\^?\w+:\]")
_NON_ASCII_WORD: Final = re.compile(r"[^\W\x00-\x7f]")
_MEMORY: Final = 32 << 20
"""bytes that RE2 may use for one pattern"""
_STEPS: Final = 20_000_000
"""size of the pattern times length of the text: in the worst case about 0.2 s"""
MATCH_SECONDS: Final = 5.0
"""for a match in another process"""
_SECONDS: Final = 0.1
"""for all matches of a pattern in a text, each of which takes little"""


class Match(NamedTuple):
    """A match to be made in another process."""

    source: str
    ignore_case: bool
    dialect: Dialect
    operation: Operation
    text: str
    number: int = 0
    """of the match to find"""

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
        """for ASCII text; None where RE2 cannot match it"""
        self._capturing: dict[bool, Any] = {}
        """the same with groups, for ASCII text and for all text, made when first needed"""
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
        """Tell whether the pattern matches somewhere in a text."""
        return self._ask("search", text) is not None

    def last_end(self, text: str) -> int | None:
        """Return where the last match ends; None without a match."""
        end: int | None = self._ask("last_end", text)
        return end

    def count(self, text: str) -> int:
        """Return the number of matches."""
        return int(self._ask("count", text))

    def find(self, text: str, number: int) -> tuple[str, ...] | None:
        """Return the groups of the match with this number, or the whole match where the pattern has no groups.

        Matches are numbered from 0, and from the end with negative numbers. A group that takes no part is an empty
        text. Without such a match, return None.
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
        """Return RE2's form of the pattern; None where RE2 could differ from Python's `re`."""
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
                engine = _compiled(self.pattern, case_sensitive=not self._ignore_case, captures=True)
            else:
                engine = _re2(self._translation.form(everywhere=everywhere, captures=True), captures=True)
            self._capturing[everywhere] = engine
        return self._capturing[everywhere]

    def _read_as_python(self) -> str | None:
        if _POSIX_CLASS.search(self.pattern):
            return "Python has no [[:alpha:]]"
        from holdfast.spec.re2_syntax import NotTranslatable, Translation

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
            self._ascii = _compiled(self.pattern, case_sensitive=not self._ignore_case)
        except ValueError as error:
            return f"RE2: {error}"
        return None


@lru_cache(maxsize=4096)
def compile_regex(source: str, *, ignore_case: bool = False, dialect: Dialect = "python") -> Regex:
    """Compile a pattern; raise a ValueError that names it where it is invalid."""
    return Regex(source, ignore_case=ignore_case, dialect=dialect)


def _re2(pattern: str, *, captures: bool = False) -> Any:
    """Compile a translation; None where it is too large for RE2, as `(a{500}){500}` is."""
    try:
        return _compiled(pattern, case_sensitive=True, captures=captures)
    except ValueError:
        return None


def _compiled(pattern: str, *, case_sensitive: bool, captures: bool = False) -> Any:
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
