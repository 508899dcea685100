"""`/run/ID` and `/run/ID/trial/SAMPLE/N`: a run in numbers, and a trial as a conversation.

A trial's stored line is at `…/line`, and files of workspaces are at `/files/RUN/DIGEST`, named only by digest.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlencode

import msgspec
from aiohttp import web

from holdfast.apps.view.counting import Counting
from holdfast.apps.view.live import look_at
from holdfast.apps.view.site import RUN_ID, Link, NotFound, archive_stamp, whole_number
from holdfast.apps.view.trial_list import Neighbours, neighbours, trial_address
from holdfast.data.messages import PICTURES, media_type_of
from holdfast.display.format import byte_count
from holdfast.errors import UsageError
from holdfast.report.overview import Overview, changes_since
from holdfast.report.run_view import GradedTrial
from holdfast.report.timeline import Timeline, trial_timeline
from holdfast.store.blobs import Blobs
from holdfast.store.catalog import Status  # noqa: TC001 - msgspec reads it
from holdfast.store.metrics import GateOutcome  # noqa: TC001 - msgspec reads it
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.apps.view.site import Site
    from holdfast.report.run_view import Pending, RunView
    from holdfast.report.timeline import TimelineTurn
    from holdfast.store.rundir import Manifest

_WHOLE: Final = 500
"""messages that a page shows at most"""
_FIRST, _LAST = 50, 200
"""messages of a longer conversation that are shown at its beginning and its end"""
_WINDOW: Final = 200
"""messages that a link to the omitted ones shows"""
_DOWNLOAD: Final = 20_000_000
"""bytes of a line or a file beyond which it is not shown, but downloaded"""
_SAFE: Final = {"Content-Security-Policy": "default-src 'none'; sandbox", "X-Content-Type-Options": "nosniff"}
"""headers of bytes that a model or a tool wrote: text, a picture or a download, whatever they contain"""


class RunPage(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers."""

    overview: Overview
    status: Status
    progress: str
    """number of trials with an output, and of all trials"""
    gate: GateOutcome | None = None
    """of a finished run that has one"""
    building: float | None = None
    """share of the run that has been read, from 0 to 1, when it is opened for the first time"""

    @property
    def links(self) -> list[tuple[str, int, str]]:
        """Statuses that some trials have, with the filters that select these trials."""
        counts = self.overview.statuses or {}
        filters = {name: name for name in ("failed", "error", "uncertain")}
        filters |= {"pending": "pending or ungraded", "passed": "passed"}
        return [(status, counts[status], query) for status, query in filters.items() if counts.get(status)]


class VerdictLink(msgspec.Struct, frozen=True):
    """The result of a checkpoint or a grader."""

    href: str
    name: str
    status: str
    score: float | None = None


class TrialPage(msgspec.Struct, frozen=True, kw_only=True):
    """A trial as a conversation."""

    timeline: Timeline
    address: str
    """without the query"""
    asked: dict[str, str]
    """the query: the list that the reader comes from, and how texts are shown"""
    neighbours: Neighbours | None

    @property
    def markdown(self) -> bool:
        """True if texts are rendered."""
        return self.asked.get("text") == "markdown"

    @property
    def summary(self) -> list[VerdictLink]:
        """The results of all checkpoints and of the graders at the end, for links to them."""
        bands = [turn.checkpoint for turn in self.timeline.turns if turn.checkpoint is not None]
        checkpoints = [VerdictLink(f"#checkpoint-{band.turn}", f"after turn {band.turn}", band.state) for band in bands]
        graders = [VerdictLink("#graders", each.name, each.status, each.score) for each in self.timeline.graders]
        return [*checkpoints, *graders]

    def link(self, name: str, value: str | int) -> str:
        """Return the address of this page with another value in its query; an empty value removes the name."""
        asked = {key: text for key, text in {**self.asked, name: str(value)}.items() if text}
        return f"{self.address}?{urlencode(asked)}" if asked else self.address


def routes(site: Site) -> list[web.RouteDef]:
    """Return the routes of these pages."""
    counting = Counting(site)
    trial = f"/run/{RUN_ID}/trial/{{sample}}/{{number:[0-9]{{1,9}}}}"

    async def show_run(request: web.Request) -> web.Response:
        run = request.match_info["run"]
        return await site.respond(request, "run.html", lambda: _run_page(site, counting, run))

    async def show_trial(request: web.Request) -> web.Response:
        return await site.respond(request, "trial.html", lambda: _trial_page(site, request))

    async def show_line(request: web.Request) -> web.Response:
        return await _respond_bytes(site, request, lambda: _line(site, request))

    async def show_file(request: web.Request) -> web.Response:
        return await _respond_bytes(site, request, lambda: _file(site, request))

    return [
        *site.page(f"/run/{RUN_ID}", show_run),
        web.get(f"{trial}/line", show_line),
        *site.page(trial, show_trial),
        web.get(f"/files/{RUN_ID}/{{digest:[0-9a-f]{{32,64}}}}", show_file),
    ]


def _run_page(site: Site, counting: Counting, run: str) -> RunPage:
    view = site.run(run)
    overview = counting.overview(run, view)
    changes = changes_since(view, _runs_beside(view))
    numbers = look_at(site, run)
    return RunPage(
        overview=msgspec.structs.replace(overview, changes=changes),
        status=numbers.status,
        progress=numbers.texts["progress"],
        gate=view.rundir.read_gate(),
        building=None if overview.counted else site.shares_read.get(run, 0.0),
    )


def _runs_beside(view: RunView) -> Iterator[Manifest]:
    """Yield the manifests of the runs in the folder of an eval; none for an archived run, which is elsewhere."""
    if archive_stamp(view.rundir):
        return
    for path in view.rundir.path.parent.iterdir():
        with suppress(UsageError, OSError):
            if (manifest := RunDir(path).read_manifest()) is not None:
                yield manifest


def _find_trial(site: Site, request: web.Request) -> GradedTrial | Pending:
    run, sample, number = (request.match_info[name] for name in ("run", "sample", "number"))
    trial = site.trial(run, sample, int(number))
    if trial is None:
        raise NotFound(
            f"run {run} has no trial {number} of sample {sample!r}",
            remedy="The dataset may have changed since the run, or the address is wrong.",
            close=[Link(f"/run/{run}/trials", "All trials of this run")],
        )
    return trial


def _trial_page(site: Site, request: web.Request) -> TrialPage:
    run = request.match_info["run"]
    trial = _find_trial(site, request)
    if isinstance(trial, GradedTrial) and trial.line is not None and trial.line.length > _DOWNLOAD:
        address = trial_address(run, trial.output.sample, trial.output.trial)
        raise NotFound(
            f"the stored line of this trial has {byte_count(trial.line.length)}, which is too much for a page",
            close=[Link(f"{address}/line", "Download the stored line")],
        )
    timeline = trial_timeline(site.run(run), trial)
    asked = {name: value for name, value in request.query.items() if name in ("q", "sort", "text")}
    return TrialPage(
        timeline=shorten(timeline, whole_number(request.query.get("from"))),
        address=trial_address(run, timeline.sample, timeline.trial),
        asked=asked,
        neighbours=neighbours(site, run, timeline.sample, timeline.trial, asked),
    )


def shorten(timeline: Timeline, start: int | None = None) -> Timeline:
    """Shorten a long conversation to its beginning and its end, and some messages from `start` if that is given."""
    numbers = [message.number for message in timeline.messages if message.number]
    if len(numbers) <= _WHOLE:
        return timeline
    shown = set(numbers[:_FIRST] + numbers[-_LAST:])
    if start is not None:
        shown |= set([number for number in numbers if number >= start][:_WINDOW])
    return msgspec.structs.replace(timeline, turns=[_shorten_turn(turn, shown) for turn in timeline.turns])


def _shorten_turn(turn: TimelineTurn, shown: set[int]) -> TimelineTurn:
    messages, hidden = [], []
    for message in turn.messages:
        if message.number and message.number not in shown:
            hidden.append(message.number)
        else:
            before = {"hidden_before": len(hidden), "hidden_from": hidden[0]} if hidden else {}
            messages.append(msgspec.structs.replace(message, **before))
            hidden = []
    after = {"hidden_after": len(hidden), "hidden_from": hidden[0]} if hidden else {}
    return msgspec.structs.replace(turn, messages=messages, **after)


class _Bytes(msgspec.Struct, frozen=True):
    data: bytes
    name: str


async def _respond_bytes(site: Site, request: web.Request, make: Callable[[], _Bytes]) -> web.Response:
    """Answer with bytes as plain text if they are a text of moderate length, else as a picture or a download."""
    content = await site.in_thread(make)
    is_text = len(content.data) <= _DOWNLOAD and b"\0" not in content.data and _is_utf8(content.data)
    kind = "text/plain; charset=utf-8" if is_text else media_type_of(content.data)
    headers = dict(_SAFE)
    if not (is_text or kind in PICTURES) or "download" in request.query:
        kind = "application/octet-stream" if not is_text else kind
        headers["Content-Disposition"] = f"attachment; filename*=UTF-8''{quote(content.name, safe='')}"
    return web.Response(body=content.data, headers={**headers, "Content-Type": kind})


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _line(site: Site, request: web.Request) -> _Bytes:
    trial = _find_trial(site, request)
    if not isinstance(trial, GradedTrial) or trial.line is None:
        raise NotFound("this trial has no output yet, so it has no stored line")
    return _Bytes(trial.line.read(), f"{trial.output.sample}-{trial.output.trial}.json")


def _file(site: Site, request: web.Request) -> _Bytes:
    digest = request.match_info["digest"]
    name = request.query.get("name", digest).rpartition("/")[2] or digest
    view = site.run(request.match_info["run"])
    path = Blobs(view.rundir.files).path(digest)
    # A run directory may be someone else's: a link in it must lead nowhere.
    if path.is_file() and path.resolve() == view.rundir.path.resolve() / path.relative_to(view.rundir.path):
        return _Bytes(path.read_bytes(), name)
    raise NotFound(f"run {view.manifest.id} has no file with the digest {digest}")
