"""Pages of a run and of a trial: complete, the same as in the report, and inert whatever the run contains."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import pytest

from holdfast.apps.view.run_pages import shorten
from holdfast.pages.environment import render_markdown
from holdfast.plugins.exporters.html import write_html
from holdfast.report.overview import Overview
from holdfast.report.run_view import RunView
from holdfast.report.timeline import Timeline, trial_timeline
from holdfast.store.rundir import RunDir
from tests.plugins.exporters.test_reports import Page
from tests.support.running import Server, holdfast, module_server, wait_for
from tests.support.showcase import agent_run, judged_run, long_run
from tests.support.viewing import viewer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.viewing import Viewer

provider = module_server()
judge = module_server(answer="judge")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, provider: Server, judge: Server) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {
        "shop": agent_run(folder),
        "endurance": long_run(folder, provider.base_url, turns=8, every=2),
        "rivers": judged_run(folder, provider.base_url, judge.base_url),
    }


@pytest.fixture(scope="module")
def shown(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    with viewer(runs["shop"].parents[2], home=tmp_path_factory.mktemp("home")) as running:
        yield running


def name_of(run: Path) -> str:
    return run.name.rpartition("-")[2]


def run_page(shown: Viewer, run: Path) -> str:
    """Return the page of a run once its trials have been counted in the background."""
    address = f"/run/{name_of(run)}"
    wait_for(lambda: shown.json(f"{address}.json")["overview"]["funnel"] is not None, "the trials to be counted")
    return shown.get(address).text


class TestRun:
    def test_the_numbers_of_a_run_match_its_report(self, shown: Viewer, runs: dict[str, Path]) -> None:
        run = runs["endurance"]
        text = run_page(shown, run)
        page = shown.json(f"/run/{name_of(run)}.json")
        assert page["status"] == "finished"
        overview = msgspec.convert(page["overview"], Overview, strict=False)
        metrics = RunView(RunDir(run)).final_metrics()
        assert overview.overall == metrics.overall
        assert [(step.turn, step.failed, step.ended_here) for step in overview.funnel or []] == [
            (2, 0, 0),
            (4, 12, 12),
            (6, 12, 0),
            (8, 12, 12),
        ]
        for expected in ("Checkpoints", "By level", "Time per trial", "Configuration"):
            assert expected in Page(text).text
        assert overview.activity is not None  # of a quick run there is nothing to plot
        assert ("Over time" in Page(text).text) == (len(overview.activity.bins) > 1)

    def test_every_number_of_the_funnel_leads_to_as_many_trials(self, shown: Viewer, runs: dict[str, Path]) -> None:
        text = run_page(shown, runs["endurance"])
        table = text.partition("graders funnel")[2].partition("</table>")[0]
        links = re.findall(r'href="(/run/[^"]*)">([\d,]+)</a>', table)
        assert len(links) >= 12
        for address, number in {(link.replace("&amp;", "&"), count) for link, count in links}:
            assert shown.json(address.replace("/trials?", "/trials.json?"))["selected"] == int(number), address

    def test_the_numbers_of_graders_and_of_values_lead_to_their_trials(
        self, shown: Viewer, runs: dict[str, Path]
    ) -> None:
        text = run_page(shown, runs["endurance"])
        links = {
            link.replace("&amp;", "&"): count for link, count in re.findall(r'href="([^"]*q=[^"]*)">([^<]+)</a>', text)
        }
        by_value = {link: value for link, value in links.items() if "level%3D" in link or "topic%3D" in link}
        assert sorted(by_value.values()) == ["birds", "clouds", "easy", "hard", "rivers", "stones"]
        for link in by_value:
            assert shown.json(link.replace("/trials?", "/trials.json?"))["selected"] in (12, 24)
        quoted = [link for link in links if "stays%20on%20topic" in link]
        assert quoted, "names with spaces are quoted"
        for link in quoted:
            assert shown.json(link.replace("/trials?", "/trials.json?"))["selected"] == int(links[link])

    def test_an_unfinished_run_has_its_numbers_so_far(self, shown: Viewer, runs: dict[str, Path]) -> None:
        page = Page(run_page(shown, runs["shop"]))
        assert "This run is not finished: 3 of 4 trials have an output." in page.text
        assert "checkpoint@1/knows 0.667 0.208 – 0.939" in page.text and "1 error" in page.text


@pytest.mark.parametrize("name", ["shop", "endurance", "rivers"])
def test_the_table_counts_pages_and_show_agree_on_the_status_of_every_trial(
    name: str, shown: Viewer, runs: dict[str, Path]
) -> None:
    run = runs[name]
    run_page(shown, run)
    address = f"/run/{name_of(run)}"
    rows = shown.json(f"{address}/trials.json")["rows"]
    statuses = [row["status"].replace("ungraded", "pending") for row in rows]
    pages = [shown.json(f"{address}/trial/{quote(row['sample'])}/{row['trial']}.json") for row in rows]
    assert [page["timeline"]["facts"]["status"] for page in pages] == statuses
    assert shown.json(f"{address}.json")["overview"]["statuses"] == Counter(statuses)
    errors = json.loads(holdfast("show", run, "--errors", "--json", cwd=run).stdout)["trials"]
    assert sorted(trial["sample"] for trial in errors) == sorted(
        row["sample"] for row, status in zip(rows, statuses, strict=True) if status == "error"
    )
    assert name != "shop" or "error" in statuses, "of a trial without an output"


class TestTrial:
    def test_the_conversation_is_drawn_with_its_checkpoints(self, shown: Viewer, runs: dict[str, Path]) -> None:
        text = shown.get(f"/run/{name_of(runs['shop'])}/trial/salt/1").text
        page = Page(text)
        order = (
            "Turn 1",
            "What does salt cost?",
            "tool call price",
            '"price": 0',
            "Checkpoint after turn 1 failed the conversation ended here",
            "contains 'do not know'",
            "Turn 2 was never asked",
            "Checkpoint after turn 2 not reached",
            "Graders at the end",
            "The stored line",
        )
        places = [page.text.index(part) for part in order]
        assert places == sorted(places)
        assert {"turn-1", "m2", "m3", "m4", "checkpoint-1", "graders"} <= set(re.findall(r'id="([^"]+)"', text))

    def test_failed_attempts_files_and_calls_are_on_it(self, shown: Viewer, runs: dict[str, Path]) -> None:
        run = name_of(runs["shop"])
        text = shown.get(f"/run/{run}/trial/tea/1").text
        page = Page(text)
        for expected in ("attempt 1 failed", "the stock service hung up", "turn 2: tea costs 3", "Recorded calls"):
            assert expected in page.text
        assert "2 files after this turn · 1 added · 1 changed · 1 removed" in page.text
        address = re.search(rf'href="(/files/{run}/[0-9a-f]+\?name=bill.json)"', text)
        assert address is not None
        assert shown.get(address[1]).text == '{"total": 3}\n'

    def test_a_judge_is_shown_with_its_words_model_and_cost(self, shown: Viewer, runs: dict[str, Path]) -> None:
        page = Page(shown.get(f"/run/{name_of(runs['rivers'])}/trial/q1/1").text)
        assert "judge judge-model · $0.0001" in page.text and "the judge's words" in page.text
        assert '"reason": "as told"' in page.text

    def test_the_json_of_a_trial_is_its_timeline(self, shown: Viewer, runs: dict[str, Path]) -> None:
        for sample in ("tea", "milk", "salt", "broken"):
            page = shown.json(f"/run/{name_of(runs['shop'])}/trial/{sample}/1.json")
            view = RunView(RunDir(runs["shop"]))
            trial = view.trial(sample, 1)
            assert trial is not None
            assert msgspec.convert(page["timeline"], Timeline) == trial_timeline(view, trial)

    def test_texts_are_raw_and_rendered_on_demand(self, shown: Viewer, runs: dict[str, Path]) -> None:
        address = f"/run/{name_of(runs['rivers'])}/trial/q1/1"
        raw, rendered = shown.get(address).text, shown.get(f"{address}?text=markdown&q=passed").text
        assert "## Question 1" in raw and "<h2>Question 1</h2>" not in raw
        assert "<h2>Question 1</h2>" in rendered and f'href="{address}?q=passed"' in rendered
        assert "40 of 40" not in rendered and "2 of 40" in Page(rendered).text

    def test_the_stored_line_is_text(self, shown: Viewer, runs: dict[str, Path]) -> None:
        answer = shown.get(f"/run/{name_of(runs['shop'])}/trial/tea/1/line")
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert "sandbox" in answer.headers["Content-Security-Policy"]
        assert answer.text + "\n" in (runs["shop"] / "outputs.jsonl").read_text()

    @pytest.mark.parametrize("address", ["trial/nobody/1", "trial/tea/2", "trial/tea/0", "trial/broken/1/line"])
    def test_an_unknown_trial_is_not_found(self, shown: Viewer, runs: dict[str, Path], address: str) -> None:
        assert shown.get(f"/run/{name_of(runs['shop'])}/{address}").status == 404


class TestFiles:
    def test_files_are_found_only_by_their_digest(self, shown: Viewer, runs: dict[str, Path]) -> None:
        run = name_of(runs["shop"])
        for address in (f"{'0' * 32}", "../manifest.json", "ab/cd", "manifest.json", f"{'g' * 32}"):
            assert shown.get(f"/files/{run}/{address}").status == 404

    def test_links_are_not_followed(self, shown: Viewer, runs: dict[str, Path], tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("secret")
        link = runs["shop"] / "files" / "ee" / ("f" * 30)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(secret)
        try:
            assert shown.get(f"/files/{name_of(runs['shop'])}/ee{'f' * 30}").status == 404
        finally:
            link.unlink()

    def test_files_that_are_not_text_are_downloaded(self, shown: Viewer, runs: dict[str, Path]) -> None:
        run = runs["shop"]
        digest = "dd" + "1" * 30
        path = run / "files" / "dd" / ("1" * 30)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"<script>alert(1)</script>")
        text = shown.get(f"/files/{name_of(run)}/{digest}")
        assert text.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert (
            text.headers["X-Content-Type-Options"] == "nosniff" and "sandbox" in text.headers["Content-Security-Policy"]
        )
        path.write_bytes(b"\0<script>")
        answer = shown.get(f"/files/{name_of(run)}/{digest}?name=a/b%22%0Ac.html")
        assert answer.headers["Content-Type"] == "application/octet-stream"
        assert answer.headers["Content-Disposition"] == "attachment; filename*=UTF-8''b%22%0Ac.html"


def test_the_report_and_the_pages_show_the_same(shown: Viewer, runs: dict[str, Path], tmp_path: Path) -> None:
    """Templates are shared; this holds what they make of one run against each other."""
    for name in ("endurance", "shop"):
        run = runs[name]
        write_html(RunView(RunDir(run)), tmp_path)
        report = (tmp_path / "report.html").read_text()
        page = run_page(shown, run)
        for part in ("checkpoints", "graders", "distributions"):
            ours, theirs = (_section(part, text) for text in (report, page))
            assert ours == theirs != ""
    cards = re.split(r'<li class="trial"', (tmp_path / "report.html").read_text())[1:]
    for sample, card in zip(("tea", "milk", "salt", "broken"), cards, strict=True):
        page = shown.get(f"/run/{name_of(runs['shop'])}/trial/{sample}/1").text
        talk = page.partition('<div class="talk">')[2]
        for kind in ("band", "attempt", "verdict"):
            drawn, expected = (_texts(kind, text) for text in (card, talk))
            assert drawn == expected, kind
        assert _texts("band", talk) or sample == "broken"


def _section(name: str, text: str) -> str:
    """Return the text below a heading, up to the next one."""
    below = text.partition(f'<h2 id="{name}">')[2].partition("</h2>")[2]
    html = re.split(r"<h2|<details class=.configuration", below)[0]
    return Page(f"<div>{html}</div>").text


ENDS = {"band": "</section>", "verdict": "</li>", "attempt": "</div>"}


def _texts(kind: str, text: str) -> list[str]:
    """Return the texts of the elements of a kind."""
    pieces = [piece.partition(">")[2].partition(ENDS[kind])[0] for piece in re.split(rf'class="{kind}[ "]', text)[1:]]
    return [" ".join(re.sub(r"<[^>]*>", " ", piece).split()) for piece in pieces]


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=alert(1)>",
        "![x](https://example.org/a.png)",
        "[x](javascript:alert(1))",
        "[x](data:text/html,<script>)",
        "<a href='javascript:1'>x</a>",
        "[![x](http://example.org/i.png)](vbscript:x)",
        "```\n</code></pre><script>\n```",
        "| a |\n|---|\n| <b onmouseover=x> |",
    ],
)
def test_rendered_markdown_is_inert(text: str) -> None:
    html = str(render_markdown(text))
    tags = re.findall(r"<(\w+)([^>]*)>", html)
    assert {tag for tag, _ in tags} <= {"p", "a", "pre", "code", "table", "thead", "tbody", "tr", "th", "td"}
    for tag, attributes in tags:
        assert tag == "a" or not attributes.strip(), html
        assert "javascript:" not in attributes and "data:" not in attributes and "vbscript:" not in attributes


def test_markdown_of_great_length_stays_raw() -> None:
    text = "# <b>" + "x" * 200_000
    assert str(render_markdown(text)).startswith('<div class="text"># &lt;b&gt;xxx')


class TestLongConversations:
    @staticmethod
    def timeline(runs: dict[str, Path], copies: int) -> Timeline:
        view = RunView(RunDir(runs["shop"]))
        trial = view.trial("tea", 1)
        assert trial is not None
        whole = trial_timeline(view, trial)
        turns = [
            msgspec.structs.replace(
                whole.turns[0],
                number=turn + 1,
                messages=[
                    msgspec.structs.replace(message, number=turn * 10 + place + 1)
                    for place, message in enumerate((whole.turns[0].messages * 4)[:10])
                ],
            )
            for turn in range(copies)
        ]
        return msgspec.structs.replace(whole, opening=[], turns=turns)

    def test_the_first_and_the_last_messages_are_shown_with_links_to_the_rest(self, runs: dict[str, Path]) -> None:
        whole = self.timeline(runs, 100)
        short = shorten(whole)
        numbers = [message.number for message in short.messages]
        assert numbers == [*range(1, 51), *range(801, 1001)]
        assert len(short.turns) == 100, "turns and their checkpoints stay"
        assert [(turn.hidden_after, turn.hidden_from) for turn in short.turns[4:7]] == [(0, 0), (10, 51), (10, 61)]

    def test_a_window_shows_what_a_link_asks_for(self, runs: dict[str, Path]) -> None:
        numbers = [message.number for message in shorten(self.timeline(runs, 100), 301).messages]
        assert numbers == [*range(1, 51), *range(301, 501), *range(801, 1001)]

    def test_shorter_ones_are_whole(self, runs: dict[str, Path]) -> None:
        whole = self.timeline(runs, 50)
        assert shorten(whole) is whole
