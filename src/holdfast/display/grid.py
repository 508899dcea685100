"""Tables that fit the terminal: columns are left out before a number is cut, and names wrap."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.box import HEAVY_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

Cell = str | Text
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


def make_console(piped_width: int = 120) -> Console:
    """Return the console of standard output; into a pipe it is as wide as a table may need."""
    piped = not sys.stdout.isatty()
    # Names and paths are the users': square brackets and colons in them mean themselves.
    return Console(markup=False, emoji=False, highlight=False, soft_wrap=piped, width=piped_width if piped else None)


def fit_table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int, *, title: str = "", plain: bool = False
) -> Table:
    """Return a table no wider than `width`; `plain` has no lines."""
    shown = list(range(len(columns)))
    while _min_width(columns, rows, shown, plain=plain) > width and any(columns[number].spare for number in shown):
        shown.remove(max(shown, key=lambda number: columns[number].spare))
    widths = _widths(columns, rows, shown, width, plain=plain)
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=None if plain else HEAVY_HEAD,
        pad_edge=not plain,
    )
    for number in shown:
        column = columns[number]
        table.add_column(
            _wrap(column.title, widths[number]),
            justify="left" if column.name or column.word else "right",
            overflow="fold",
            width=widths[number],
        )
    for row in rows:
        table.add_row(
            *(_wrap(row[number], widths[number]) if columns[number].name else row[number] for number in shown)
        )
    return table


def fits(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> bool:
    """Tell whether a table with all its columns is no wider than `width`."""
    return _min_width(columns, rows, list(range(len(columns))), plain=False) <= width


def _wrap(cell: Cell, width: int) -> Cell:
    """Break a name that is too long into lines, after a hyphen or the like rather than inside a word."""
    if isinstance(cell, Text) or cell_len(cell) <= width:
        return cell
    lines = [""]
    for part in re.findall(r"[^-_/.\s]*[-_/.\s]?", cell):
        if cell_len(lines[-1] + part.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _min_width(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], shown: list[int], *, plain: bool) -> int:
    """Return the width below which a number would be cut, or a name become hard to read."""
    cells = (
        max(_word(columns[number].title), min(_MIN_NAME_WIDTH, _longest_cell(rows, number)))
        if columns[number].name
        else _cell_width(columns, rows, number)
        for number in shown
    )
    return sum(cells) + _border_width(len(shown), plain=plain)


def _widths(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], shown: list[int], width: int, *, plain: bool
) -> dict[int, int]:
    """Return each column's width: numbers as wide as they are, names as wide as the rest allows."""
    names = [number for number in shown if columns[number].name]
    widths = {number: _cell_width(columns, rows, number) for number in shown}
    too_wide = sum(widths.values()) + _border_width(len(shown), plain=plain) - width
    while too_wide > 0 and names:
        widest = max(names, key=lambda number: widths[number])
        if widths[widest] <= 1:
            break
        widths[widest] -= 1
        too_wide -= 1
    for number in shown:  # titles stand on one line where there is room
        more = min(max(0, cell_len(columns[number].title) - widths[number]), max(0, -too_wide))
        widths[number] += more
        too_wide += more
    return widths


def _border_width(count: int, *, plain: bool) -> int:
    """Return the width of the lines and blanks around a number of columns."""
    return 2 * (count - 1) if plain else 3 * count + 1


def _cell_width(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], number: int) -> int:
    return max(_word(columns[number].title), _longest_cell(rows, number))


def _longest_cell(rows: Sequence[Sequence[Cell]], number: int) -> int:
    return max((_length(row[number]) for row in rows), default=0)


def _length(cell: Cell) -> int:
    return cell_len(cell.plain if isinstance(cell, Text) else cell)


def _word(title: str) -> int:
    """Return the width of a title's longest word; a title may wrap, and very long words are broken."""
    return min(_LONGEST_WORD, max((cell_len(word) for word in title.split()), default=0))
