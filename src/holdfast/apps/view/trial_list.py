"""`/run/ID/trials`: the table of trials, filtered, sorted and searched; its rows as CSV; a trial's neighbours in it.

A filter and an order give a list of row numbers once. Pages and windows are slices of it, so that nothing is shown
twice or left out while a run goes on; a page keeps the list that it began with until it asks for a newer one.
"""

from __future__ import annotations

import io
import re
from bisect import bisect_left
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import msgspec
from aiohttp import web

from holdfast.apps.view.columns import PREVIEW, TrialRow, read_rows
from holdfast.apps.view.live import look_at
from holdfast.apps.view.query import parse_query
from holdfast.apps.view.site import RUN_ID, whole_number
from holdfast.apps.view.snapshot import facets, select
from holdfast.errors import QueryError
from holdfast.report.tables import write_rows
from holdfast.store.files import UNREADABLE, open_binary, read_lines
from holdfast.store.metrics import TrialResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from holdfast.apps.view.columns import Columns, Snapshot
    from holdfast.apps.view.site import Site
    from holdfast.apps.view.snapshot import Facet
    from holdfast.report.run_view import RunView
    from holdfast.report.trial_table import TrialTable
    from holdfast.store.catalog import Status

_PAGE: Final = 100
"""rows of a page without scripts"""
_MOST: Final = 500
"""maximum number of rows in an answer"""
_PATIENCE: Final = 0.2
"""seconds that a page waits for columns that are built for the first time, and for hits of a text"""
_FACET_VALUES: Final = 12
_NUMBERS: Final = ("trial", "turns", "tokens", "cost", "seconds", "attempt")
_result: Final = msgspec.json.Decoder(TrialResult)
_TERM: Final = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^\s"])+')


class Mistake(msgspec.Struct, frozen=True):
    """A filter that cannot be understood."""

    message: str
    position: int
    """position of the first wrong character"""
    hint: str | None


class FacetValue(msgspec.Struct, frozen=True):
    """A value that trials can be narrowed down to."""

    value: str
    count: int
    term: str
    """the condition in words"""
    query: str
    """the filter with this condition added, or removed if the filter has it"""
    chosen: bool


class FacetGroup(msgspec.Struct, frozen=True):
    """The values of one property of the selected trials."""

    name: str
    values: list[FacetValue]


class TrialsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of the table of trials."""

    run: str
    name: str
    """of the eval"""
    target: str
    status: Status
    query: str
    sort: str
    mistake: Mistake | None = None
    building: float | None = None
    """share of the run that has been read, from 0 to 1, when it is opened for the first time; ask again"""
    complete: bool = True
    """False while the search for a text goes on; ask again for further rows"""
    generation: int = 0
    """generation of the list, to ask for further rows of the same list"""
    settled: int = 0
    """trials that had all their verdicts, or had failed"""
    total: int = 0
    """trials of the run"""
    selected: int = 0
    """trials that the filter selects"""
    start: int = 0
    """place of the first row, from 0"""
    rows: list[TrialRow] = []
    graders: list[str] = []
    numbers: list[str] = []
    """numbers that are worth a column for this run"""
    facets: list[FacetGroup] = []


class Neighbours(msgspec.Struct, frozen=True):
    """The place of a trial in the list that the reader came from."""

    position: int
    """from 1"""
    count: int
    previous: str | None
    next: str | None
    up: str
    """addresses of the trials before and after it, and of the list"""


def routes(site: Site) -> list[web.RouteDef]:
    """Return the routes of this page."""

    async def show(request: web.Request) -> web.Response:
        run, asked = request.match_info["run"], request.query
        return await site.respond(request, "trials.html", lambda: trials_page(site, run, asked))

    async def download(request: web.Request) -> web.StreamResponse:
        return await _download(site, request)

    address = f"/run/{RUN_ID}/trials"
    return [*site.page(address, show), web.get(f"{address}.csv", download)]


def trial_address(run: str, sample: str, trial: int, query: str = "", sort: str = "") -> str:
    """Return the address of a trial, and of the list in which it is looked at."""
    asked = {name: value for name, value in (("q", query), ("sort", sort)) if value}
    return f"/run/{run}/trial/{quote(sample, safe='')}/{trial}" + (f"?{urlencode(asked)}" if asked else "")


def trials_page(site: Site, run: str, asked: Mapping[str, str]) -> TrialsPage:
    """Return a page or a window of the table."""
    query, sort = asked.get("q", "").strip(), asked.get("sort", "")
    manifest = site.run(run).manifest
    common: dict[str, Any] = {
        "run": run,
        "name": manifest.name,
        "target": manifest.target,
        "query": query,
        "sort": sort,
    }
    numbers = look_at(site, run)
    try:
        columns = site.columns(run, _PATIENCE)
    except TimeoutError:
        rows, graders = _first_rows(site.run(run)) if not query and not sort else ([], [])
        common |= {"status": numbers.status, "building": site.shares_read.get(run, 0.0), "total": numbers.total}
        return TrialsPage(**common, rows=rows, graders=graders, selected=numbers.total)
    common |= {
        "status": numbers.status,
        "graders": columns.table.graders,
        "settled": numbers.settled,
        "total": columns.rows,
    }
    common["numbers"] = columns.compute("numbers", partial(_telling_numbers, manifest.trials))
    try:
        generation = whole_number(asked.get("generation"))
        snapshot = select(columns, parse_query(query), sort, wait=_PATIENCE, generation=generation)
    except QueryError as error:
        return TrialsPage(**common, mistake=Mistake(error.message, error.position, error.remedy))
    start = min(whole_number(asked.get("start")) or 0, max(0, len(snapshot.rows) - 1))
    count = whole_number(asked.get("count"))
    return TrialsPage(
        **common,
        complete=snapshot.complete,
        generation=snapshot.generation,
        selected=len(snapshot.rows),
        start=start,
        rows=read_rows(columns, snapshot.rows[start : start + min(_PAGE if count is None else count, _MOST)]),
        facets=[] if asked.get("facets") == "0" else _facet_groups(columns, snapshot, query),
    )


def _first_rows(view: RunView) -> tuple[list[TrialRow], list[str]]:
    """Return the first rows of a finished run, read from the lines of its report, and the names of its graders."""
    rows: list[TrialRow] = []
    with suppress(OSError, *UNREADABLE), open_binary(view.rundir.results) as file:
        reported = read_lines(file, view.rundir.results)
        if next(reported, b"").endswith(b'"trials":[\n'):
            for number, line in enumerate(islice(reported, _PAGE)):
                if line.startswith(b"]"):
                    break
                trial = _result.decode(line.rstrip(b",\n"))
                row = TrialRow(
                    row=number,
                    sample=trial.sample,
                    trial=trial.trial,
                    status=trial.status,
                    score=trial.score,
                    graders={name: (grade.status, grade.score) for name, grade in trial.grades.items()},
                    answer=trial.answer or "",
                    preview=(trial.output or "")[:PREVIEW],
                )
                rows.append(row)
    return rows, view.graders if rows else []


def _telling_numbers(trials: int, table: TrialTable) -> list[str]:
    """Return the columns of numbers in which some row has more than its default."""
    conditions = {name: f"{name} > 1" for name in ("turns", "attempt")}
    conditions |= {name: f"{name} IS NOT NULL" for name in ("tokens", "cost", "seconds")}
    names = [name for name, where in conditions.items() if any(table.select("1", f"{where} LIMIT 1"))]
    return [name for name in _NUMBERS if name in names or (name == "trial" and trials > 1)]


def _facet_groups(columns: Columns, snapshot: Snapshot, query: str) -> list[FacetGroup]:
    counted = facets(columns, snapshot)
    alone = {
        name
        for name in counted
        if "/" in name and sum(each.startswith(name.split("/")[0] + "/") for each in counted) == 1
    }
    groups = [FacetGroup(name, _facet_values(values, query)) for name, values in counted.items() if name not in alone]
    # A value that all trials share narrows nothing down.
    return [group for group in groups if len(group.values) > 1 or any(value.chosen for value in group.values)]


def _facet_values(values: list[Facet], query: str) -> list[FacetValue]:
    terms = _terms(query)
    return [
        FacetValue(each.value, each.count, each.query, _toggle(query, terms, each.query), each.query in terms)
        for number, each in enumerate(values)
        if number < _FACET_VALUES or each.query in terms
    ]


def _terms(query: str) -> list[str]:
    """Return the conditions of a filter that must all hold; none if it has alternatives or groups."""
    terms = _TERM.findall(query)
    return [] if "or" in terms or any(term.lstrip("-").startswith("(") for term in terms) else terms


def _toggle(query: str, terms: list[str], term: str) -> str:
    """Return a filter with a condition added, or removed if it is one of the filter's terms."""
    if term in terms:
        return " ".join(each for each in terms if each != term)
    return f"({query}) {term}" if query and not terms else f"{query} {term}".strip()


def neighbours(site: Site, run: str, sample: str, trial: int, asked: Mapping[str, str]) -> Neighbours | None:
    """Return the place of a trial in the list that an address names; None if it is not there, or not yet known."""
    query, sort = asked.get("q", "").strip(), asked.get("sort", "")
    try:
        columns = site.columns(run, _PATIENCE)
        columns.refresh()
        row = columns.find(sample, trial)
        if row is None:
            return None
        rows = select(columns, parse_query(query), sort, wait=_PATIENCE).rows
        place = rows.index(row) if sort else bisect_left(rows, row)
    except (TimeoutError, QueryError, ValueError):
        return None
    if place == len(rows) or rows[place] != row:
        return None

    def address(number: int) -> str | None:
        if not 0 <= number < len(rows):
            return None
        ((other, trial),) = columns.table.select("sample, trial", "n = ?", (rows[number],))
        return trial_address(run, other, trial, query, sort)

    asked_for = {name: value for name, value in (("q", query), ("sort", sort)) if value}
    up = f"/run/{run}/trials" + (f"?{urlencode(asked_for)}" if asked_for else "")
    return Neighbours(place + 1, len(rows), address(place - 1), address(place + 1), up)


async def _download(site: Site, request: web.Request) -> web.StreamResponse:
    """Answer with all rows of a filter as CSV, piece by piece."""
    run, asked = request.match_info["run"], request.query
    query, sort = asked.get("q", "").strip(), asked.get("sort", "")

    def begin() -> tuple[Columns, Snapshot]:
        columns = site.columns(run)
        columns.refresh()
        return columns, select(columns, parse_query(query), sort)

    try:
        columns, snapshot = await site.in_thread(begin)
    except QueryError as error:
        return web.Response(status=400, text=f"{error}\n")
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/csv; charset=utf-8",
            "Content-Disposition": f'attachment; filename="trials-{run}.csv"',
        }
    )
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    await response.write(_csv([_head(columns.table.graders)]))
    for start in range(0, len(snapshot.rows), _MOST):
        numbers = snapshot.rows[start : start + _MOST]
        await response.write(await site.in_thread(partial(_csv_rows, columns, numbers)))
    return response


_PLAIN: Final = (
    *("status", "sample", "trial", "score", "turns", "tokens", "cost", "seconds", "attempt"),
    *("answer", "stop", "error"),
)


def _head(graders: list[str]) -> list[str]:
    return [*_PLAIN, *(f"{name} {what}" for name in graders for what in ("status", "score")), "preview"]


def _lines(rows: list[TrialRow], graders: list[str]) -> Iterator[list[Any]]:
    for row in rows:
        verdicts = [part for name in graders for part in row.graders.get(name, ("", None))]
        yield [*(getattr(row, name) for name in _PLAIN), *verdicts, row.preview]


def _csv_rows(columns: Columns, numbers: Iterable[int]) -> bytes:
    return _csv(_lines(read_rows(columns, numbers), columns.table.graders))


def _csv(lines: Iterable[list[Any]]) -> bytes:
    text = io.StringIO()
    write_rows(text, lines)
    return text.getvalue().encode("utf-8", "backslashreplace")
