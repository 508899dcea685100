"""Pages that follow a run which another process writes, is killed, and is resumed."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.view.columns import open_columns, read_rows
from holdfast.apps.view.live import Watch
from holdfast.apps.view.site import Site
from holdfast.report.trial_table import TableFiller
from tests.apps.view.journals import JournaledRun, whole_trial
from tests.support.running import PATIENCE, holdfast, module_server, run_dir, start, wait_for, write_eval
from tests.support.viewing import Viewer, browser, opened, viewer

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

    from tests.support.running import Server

__all__ = ["browser"]
provider = module_server()
GATE = "gate.exact=1"
"""a gate that runs of `write_eval` do not meet"""


@contextmanager
def slow_run(folder: Path, provider: Server, rows: int = 2000) -> Iterator[subprocess.Popen[str]]:
    """A run that has begun and would take minutes."""
    provider.control(latency=0.1)
    file = write_eval(folder, provider.base_url, rows=rows, limits={"concurrency": 4})
    process = start("eval", file, "--display", "none", cwd=folder)
    try:
        wait_for(lambda: outputs(folder) > 8, "the first outputs")
        yield process
    finally:
        process.kill()
        process.communicate()
        provider.control(latency=0)


def outputs(folder: Path) -> int:
    """Return the number of outputs of the only run."""
    return sum(path.read_bytes().count(b"\n") for path in (folder / "runs").glob("e/*/outputs.jsonl"))


def events(connection: http.client.HTTPConnection, shown: Viewer, path: str) -> Iterator[tuple[str, Any]]:
    """Follow a stream."""
    connection.request("GET", path, headers={"Authorization": f"Bearer {shown.key}"})
    response = connection.getresponse()
    assert response.headers["Content-Type"] == "text/event-stream"
    name = ""
    while line := response.readline().decode():
        if line.startswith("event: "):
            name = line[7:].strip()
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def files_of(run: Path) -> dict[str, tuple[int, int]]:
    """Return the size and time of every file in a run directory and next to it, by path."""
    paths = [*run.rglob("*"), *run.parent.iterdir()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def test_a_stream_says_how_far_a_run_is_and_that_its_process_is_gone(tmp_path: Path, provider: Server) -> None:
    with slow_run(tmp_path, provider) as process, viewer(tmp_path) as shown:
        run = run_dir(tmp_path).name.rpartition("-")[2]
        with closing(http.client.HTTPConnection("127.0.0.1", shown.port, timeout=300)) as connection:
            done, status = [], []
            for name, data in events(connection, shown, f"/events/run/{run}"):
                if name == "progress":
                    done.append(data["done"])
                    assert data["total"] == 2000
                    if len(done) == 3:
                        process.send_signal(signal.SIGKILL)
                        process.wait()
                if name == "state":
                    status.append(data["status"])
                    if data["status"] != "running":
                        break
            assert done == sorted(done)
            assert done[2] > done[0]
            assert status == ["running", "unfinished"]
        before = files_of(run_dir(tmp_path))
        for page in ("/", f"/run/{run}", f"/run/{run}/trials", f"/run/{run}/trial/s0/1", f"/run/{run}/trials.csv"):
            assert shown.get(page).status == 200
        assert files_of(run_dir(tmp_path)) == before


def test_an_open_stream_does_not_delay_the_end(tmp_path: Path, provider: Server) -> None:
    holdfast("eval", write_eval(tmp_path, provider.base_url, rows=2), cwd=tmp_path)
    with ExitStack() as stack:
        with viewer(tmp_path) as shown:  # which ends it as Ctrl-C does
            connection = stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", shown.port)))
            stream = events(connection, shown, "/events/runs")
            assert next(stream)[0] == "list"
        assert list(stream) == []


def test_the_numbers_of_a_stream_can_be_asked_for(tmp_path: Path, provider: Server) -> None:
    holdfast("eval", write_eval(tmp_path, provider.base_url, rows=4), cwd=tmp_path)
    with viewer(tmp_path) as shown:
        run = run_dir(tmp_path).name.rpartition("-")[2]
        wait_for(lambda: shown.json(f"/run/{run}/trials.json")["building"] is None, "the columns")
        answers = dict(wait_for(lambda: settled(shown, run), "all numbers"))
        assert answers["progress"]["texts"]["progress"] == "4 of 4"
        assert answers["progress"]["texts"]["score"] == "0.500"
        assert answers["state"]["status"] == "finished"
        assert answers["rows"]["settled"] == 4
        assert shown.get("/events/run/00.json").status == 404
        assert shown.get("/events/run/00").status == 404


def settled(shown: Viewer, run: str) -> Any:
    """Return the numbers of a run once its trials have been read."""
    answers = shown.json(f"/events/run/{run}.json")
    return answers if dict(answers)["rows"]["settled"] else None


@pytest.mark.browser
@pytest.mark.faults
def test_a_page_follows_a_run_that_is_killed_and_resumed(browser: Browser, tmp_path: Path, provider: Server) -> None:
    with slow_run(tmp_path, provider, 1500) as process, viewer(tmp_path) as shown:
        run = run_dir(tmp_path).name.rpartition("-")[2]
        wait_for(lambda: shown.json(f"/run/{run}/trials.json")["building"] is None, "the columns")
        with opened(browser, shown, f"/run/{run}/trials?q=-pending") as page, opened(browser, shown) as overview:
            badge = page.locator("h1 .badge")
            assert badge.inner_text() == "running"
            page.locator(".virtual tbody a[href]").first.wait_for()
            count = page.locator("[data-count]")
            news = page.locator("[data-news] button")
            news.wait_for()
            before, first = count.inner_text(), news.inner_text()
            assert re.fullmatch(r"[\d,]+ new", first)
            wait_for(lambda: news.inner_text() != first, "more news")
            assert count.inner_text() == before  # nothing moves until it is asked for
            news.click()
            wait_for(lambda: count.inner_text() != before, "the new rows")
            listed = overview.locator(f"tr[data-run='{run}']")
            progress = listed.locator("[data-live=progress]").inner_text()
            overview.locator("[data-live=progress]").filter(has_not_text=progress).wait_for()
            listed.locator("[data-live=eta]", has_text="left").wait_for()

            process.send_signal(signal.SIGKILL)
            process.wait()
            page.locator("h1 .badge.unfinished", has_text="unfinished").wait_for()
            overview.locator("[data-news] a").wait_for()  # the list has changed

            provider.control(latency=0)
            holdfast("eval", "e.yaml", "--display", "none", GATE, cwd=tmp_path, check=1)
            page.locator("h1 .badge.gate.failed", has_text="gate failed").wait_for()
            news.wait_for()
            news.click()
            page.locator("[data-count]", has_text="1,500 of 1,500").wait_for()


@pytest.mark.browser
def test_where_streams_do_not_get_through_the_page_asks_and_says_so(
    browser: Browser, tmp_path: Path, provider: Server
) -> None:
    holdfast("eval", write_eval(tmp_path, provider.base_url, rows=2), cwd=tmp_path)
    with viewer(tmp_path) as shown:
        context = browser.new_context()
        try:
            page = context.new_page()
            page.goto(f"{shown.base}/open?key={shown.key}")
            page.route("**/events/runs", lambda route: route.abort())
            page.goto(f"{shown.base}/")
            page.get_by_text("the numbers are asked for every five seconds").wait_for()
        finally:
            context.close()


def test_a_large_unfinished_run_has_an_estimate_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = JournaledRun(tmp_path)
    for sample in range(2):
        for event in whole_trial(sample, 1):
            run.append(event)
    watch = Watch("run", run.rundir, lambda: None)
    assert watch.numbers().texts["progress"] == "2 of 6"
    monkeypatch.setattr("holdfast.apps.view.live._LARGE", 1)
    first_line = (run.rundir.path / "outputs.jsonl").read_bytes().index(b"\n") + 1
    monkeypatch.setattr("holdfast.apps.view.live._SAMPLED", first_line)
    numbers = Watch("run", run.rundir, lambda: None).numbers()
    assert (numbers.status, numbers.texts["progress"]) == ("unfinished", "about 2 of 6")
    run.report()
    assert Watch("run", run.rundir, lambda: None).numbers().texts["progress"] == "2 of 6"


def test_an_unfinished_run_keeps_its_score_while_a_page_follows_it(tmp_path: Path) -> None:
    run = JournaledRun(tmp_path)
    for event in whole_trial(1, 1):
        run.append(event)
    columns = open_columns(run.rundir)
    numbers = Watch("run", run.rundir, lambda: columns).numbers()
    assert (numbers.status, numbers.score) == ("unfinished", read_rows(columns, [2])[0].score)
    assert numbers.rate is None


def test_a_page_does_not_wait_for_a_large_run_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = JournaledRun(tmp_path)
    for event in whole_trial(1, 1):
        run.append(event)
    go = threading.Event()
    fill = TableFiller.fill

    def slow_fill(filler: TableFiller, progress: Callable[[float], None]) -> None:
        assert go.wait(PATIENCE)
        fill(filler, progress)

    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1")
    monkeypatch.setattr(TableFiller, "fill", slow_fill)
    site = Site(tmp_path / "none", tmp_path / "home", {"run": run.rundir})
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(site.columns, "run", wait=threading.TIMEOUT_MAX)
        try:
            assert isinstance(asked.exception(PATIENCE), TimeoutError)
        finally:
            go.set()
    assert site.columns("run").rows == 6
    site.close()


def test_a_run_that_is_removed_while_it_is_shown_is_not_found(tmp_path: Path, provider: Server) -> None:
    holdfast("eval", write_eval(tmp_path, provider.base_url, rows=2), cwd=tmp_path)
    run = run_dir(tmp_path)
    with viewer(tmp_path) as shown:
        address = f"/run/{run.name.rpartition('-')[2]}"
        wait_for(lambda: shown.json(f"{address}/trials.json")["building"] is None, "the columns")
        first = shown.json(f"{address}/trials.json")["rows"][0]
        trial = f"{address}/trial/{first['sample']}/{first['trial']}"
        assert shown.get(trial).status == 200
        shutil.rmtree(run)
        answer = shown.get(trial)
        assert answer.status == 404 and "no run" in answer.text
