"""The console, and tables that fit it: columns are left out before a number is cut, and names wrap.

`fit_table` makes a table of rich. `print_list` prints thousands of rows, for which rich would take seconds.
`print_paged` prints what may be longer than the screen.
"""

from __future__ import annotations

import re
import sys
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click
from rich.box import HEAVY_HEAD
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from holdfast.display.terminal import UNSAFE, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import ConsoleOptions, RenderableType

Cell = str | Text
C = TypeVar("C", str, Cell)
_MIN_NAME_WIDTH: Final = 10
"""cells that a name gets before a column is left out for it"""
_LONGEST_WORD: Final = 16


class Column(NamedTuple):
    """A column of a table."""

    title: str
    name: bool = False
    """holds names or sentences, which may wrap; otherwise numbers, which never do"""
    spare: int = 0
    """priority for being left out: the highest is left out first; 0 always stays"""
    word: bool = False
    """holds a word: on the left like a name, whole like a number"""

    @property
    def is_left(self) -> bool:
        """True if its cells begin at the left."""
        return self.name or self.word


class SafeConsole(Console):
    """A console of rich that spells out control characters in texts; rich's own control codes pass."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Spell out a text before its layout, and anything else after it."""
        for segment in super().render(_spelled(renderable) if isinstance(renderable, Text) else renderable, options):
            text = segment.text
            if segment.control or text.isprintable() or text == "\n":
                yield segment
            else:
                yield Segment(printable(text), segment.style)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as a text, spelled out."""
        return super().render_str(printable(text), **options)


def _spelled(text: Text) -> Text:
    """Spell out the control characters of a text, which keeps its styles."""
    plain = text.plain
    if plain.isprintable() or printable(plain) == plain:
        return text
    pieces = text.divide(sorted({place for match in re.finditer(UNSAFE, plain) for place in match.span()}))
    for piece in pieces:
        if (safe := printable(piece.plain)) != piece.plain:
            spans = [span._replace(end=len(safe)) for span in piece.spans]
            piece.plain = safe
            piece.spans = spans
    return text.blank_copy().join(pieces)


def make_console(piped_width: int = 120) -> Console:
    """Return the console of standard output; in a pipe it is as wide as a table may need."""
    piped = not sys.stdout.isatty()
    # Square brackets and colons in users' names and paths are no markup.
    return SafeConsole(
        markup=False, emoji=False, highlight=False, soft_wrap=piped, width=piped_width if piped else None
    )


def fit_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int, *, title: str = "") -> Table:
    """Return a table no wider than `width`."""
    columns, rows = _safe_cells(columns, rows)
    widths = _fit(columns, rows, width, plain=False)
    table = Table(title=title or None, title_justify="left", title_style="bold", box=HEAVY_HEAD)
    for number in widths:
        column = columns[number]
        table.add_column(
            _wrap(column.title, widths[number]),
            justify="left" if column.is_left else "right",
            overflow="fold",
            width=widths[number],
        )
    for row in rows:
        table.add_row(
            *(_wrap(row[number], widths[number]) if columns[number].name else row[number] for number in widths)
        )
    return table


def print_list(
    console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Mapping[str, str]
) -> None:
    """Print a table without lines that fits the console. Cells of words get their style of `styles`."""
    columns, rows = _safe_cells(columns, rows)
    widths = _fit(columns, rows, console.width, plain=True)
    styled = {}
    for number in widths:
        for word in {row[number] for row in rows} & styles.keys() if columns[number].word else ():
            with console.capture() as capture:
                console.print(Text(word, styles[word]), end="")
            styled[word] = capture.get()
    shown, places = [columns[number] for number in widths], [*widths.values()]
    for line in _lines(shown, [column.title for column in shown], places, {}):
        console.print(Text(line, "bold"), soft_wrap=True)
    for row in rows:
        for line in _lines(shown, [row[number] for number in widths], places, styled):
            console.file.write(f"{line}\n")


def _safe_cells(columns: Sequence[Column], rows: Sequence[Sequence[C]]) -> tuple[list[Column], list[list[C]]]:
    """Spell out titles and cells before their widths are measured."""
    cells = [[printable(cell, "\n") if isinstance(cell, str) else cell for cell in row] for row in rows]
    return [column._replace(title=printable(column.title, "")) for column in columns], cells


def _lines(
    columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int], styled: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines of a row."""
    texts = [_fold(cell, width) if _length(cell) > width else [cell] for cell, width in zip(cells, widths, strict=True)]
    for parts in zip_longest(*texts, fillvalue=""):
        line = []
        for column, part, width in zip(columns, parts, widths, strict=True):
            blank = " " * (width - _length(part))
            text = styled.get(part, part) if column.word else part
            line.append(text + blank if column.is_left else blank + text)
        yield "  ".join(line).rstrip()


def _fold(cell: str, width: int) -> list[str]:
    """Break a cell into lines, none of which is too wide."""
    lines = str(_wrap(cell, width)).split("\n")
    return [piece for line in lines for piece in (chop_cells(line, width) if _length(line) > width else [line])]


def fits(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> bool:
    """Return True if a table with all its columns is no wider than `width`."""
    return _min_width(columns, _longest_cells(columns, rows), range(len(columns)), plain=False) <= width


def _fit(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int, *, plain: bool) -> dict[int, int]:
    """Return the widths of the columns that are shown, by their numbers; `plain` tables have no lines."""
    longest, shown = _longest_cells(columns, rows), list(range(len(columns)))
    while _min_width(columns, longest, shown, plain=plain) > width and any(columns[number].spare for number in shown):
        shown.remove(max(shown, key=lambda number: columns[number].spare))
    return _widths(columns, longest, shown, width, plain=plain)


def _wrap(cell: Cell, width: int) -> Cell:
    """Break a name that is too long into lines, preferably after a hyphen or the like."""
    if isinstance(cell, Text) or cell_len(cell) <= width:
        return cell
    lines = [""]
    for part in filter(None, re.findall(r"[^-_/.\s]*[-_/.\s]?", cell)):
        if cell_len(lines[-1] + part.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _min_width(columns: Sequence[Column], longest: Sequence[int], shown: Sequence[int], *, plain: bool) -> int:
    """Return the width below which a number would be cut, or a name become hard to read."""
    cells = (
        max(
            _word(columns[number].title),
            min(_MIN_NAME_WIDTH, longest[number]) if columns[number].name else longest[number],
        )
        for number in shown
    )
    return sum(cells) + _border_width(len(shown), plain=plain)


def _widths(
    columns: Sequence[Column], longest: Sequence[int], shown: list[int], width: int, *, plain: bool
) -> dict[int, int]:
    """Return each column's width: numbers as wide as they are, names as wide as the rest allows."""
    names = [number for number in shown if columns[number].name]
    widths = {number: max(_word(columns[number].title), longest[number]) for number in shown}
    too_wide = sum(widths.values()) + _border_width(len(shown), plain=plain) - width
    while too_wide > 0 and names:
        widest = max(names, key=lambda number: widths[number])
        if widths[widest] <= 1:
            break
        widths[widest] -= 1
        too_wide -= 1
    for number in shown:  # titles are on one line if there is room
        more = min(max(0, cell_len(columns[number].title) - widths[number]), max(0, -too_wide))
        widths[number] += more
        too_wide += more
    return widths


def _border_width(count: int, *, plain: bool) -> int:
    """Return the width of the lines and blanks around a number of columns."""
    return 2 * (count - 1) if plain else 3 * count + 1


def _longest_cells(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> list[int]:
    """Return the width of the longest cell of each column."""
    return [max((_length(row[number]) for row in rows), default=0) for number in range(len(columns))]


def _length(cell: Cell) -> int:
    text = cell.plain if isinstance(cell, Text) else cell
    return len(text) if text.isascii() and text.isprintable() else cell_len(text)


def _word(title: str) -> int:
    """Return the width of a title's longest word; a title may wrap, and very long words are broken."""
    return min(_LONGEST_WORD, max((cell_len(word) for word in title.split()), default=0))


def print_paged(pieces: Iterable[RenderableType]) -> None:
    """Print pieces as they come; on a terminal, start `$PAGER` once there is more than a screen of them."""
    console = make_console()
    if not sys.stdout.isatty():
        for piece in pieces:
            console.print(piece)
        return
    texts = _draw(console, pieces)
    screen: list[str] = []
    room = console.height - 1
    for text in texts:
        screen.append(text)
        room -= text.count("\n")
        if room < 0:
            click.echo_via_pager(chain(screen, texts))
            return
    sys.stdout.write("".join(screen))


def _draw(console: Console, pieces: Iterable[RenderableType]) -> Iterator[str]:
    for piece in pieces:
        with console.capture() as capture:
            console.print(piece)
        yield capture.get()
