"""Find phrases that read like a translation, in docstrings, comments, messages and pages.

    python scripts/english.py src docs README.md tests

Prints each phrase with its file, line and a better way to say it, and exits with 1 if there are any. `IDIOMS` lists
uses that are plain English: rewrite the sentence before you add one.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PHRASES: Final = {
    r"\b(?:that|those) of\b": "use the possessive, or name the thing again",
    r"\bfrom which on\b": "once, after, as soon as",
    r"\balone\b": "only",
    r"\bbehind\b": "after",
    r"\b(?:is|are|was|were|has|have|had) none\b": "has no …, there is no …",
    r"\bas far as\b": "if, to the extent that, up to",
    r"(?:^|[,;(:]\s|\b(?:only|except|but|and|or|even|also|than)\s)where\b": "if, when",
    r"\bbeside\b": "next to, besides, in addition to",
    r"\b[Tt]ells? (?:whether|which|what|how|when|why|of|from)\b": "return, show, report, describe",
    r"\bany more\b": "no longer",
}
"""regular expressions, and what to write instead"""
IDIOMS: Final = (
    r"\b(?:leav\w+|left)\b[^.;]{0,40}\bbehind\b",
    r"\bbehind (?:HTTP|(?:the|a|an|its|your|our) \w*(?:proxy|firewall|gateway|balancer|server))\b",
    r"\b(?:left|leaves?|stands?) alone\b",
    r"\bthere (?:is|are) none\b",
    r"\b(?:has|have|had) none of\b",
    r"\bwhere(?=$|,|: | (?:to|is|are|was|were|do|does|things)\b| \d+ is\b)",
    r"""^["'][\w./]+["']$""",
)
"""regular expressions of phrases that are plain English after all"""

_IDIOMS: Final = re.compile("|".join(IDIOMS))
_PATTERNS: Final = [(re.compile(pattern), advice) for pattern, advice in PHRASES.items()]


def main(roots: Sequence[str]) -> int:
    """Print every phrase in Python and Markdown files below the roots; return 1 if there are any."""
    count = 0
    for path in _files(roots):
        for number, line in _prose(path):
            text = _IDIOMS.sub("", line)
            for pattern, advice in _PATTERNS:
                if match := pattern.search(text):
                    count += 1
                    print(f"{path}:{number}: {match[0].strip()!r}: {advice}\n    {line.strip()}")
    if count:
        print(f"{count} phrases read like a translation", file=sys.stderr)
    return int(count > 0)


def _files(roots: Sequence[str]) -> Iterator[Path]:
    """Yield the roots that are files, and the Python and Markdown files below those that are folders."""
    for root in map(Path, roots):
        if root.is_file():
            yield root
        else:
            yield from sorted([*root.rglob("*.py"), *root.rglob("*.md")])


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a page, or of the comments and texts in a module."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(source.splitlines(), start=1)
        return
    texts = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in texts:
            yield from enumerate(token.string.splitlines(), start=token.start[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
