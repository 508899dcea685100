"""`/run/ID/trials`: filter, order, pages and rows as CSV, as the server answers them; and the list of runs."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.view.trial_list import trial_address
from tests.support.running import holdfast, run_dir, server, wait_for, write_eval
from tests.support.viewing import Viewer, viewer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 240 trials, and runs of another eval with two models."""
    path = tmp_path_factory.mktemp("listed")
    with server() as running:
        holdfast("eval", write_eval(path, running.base_url, rows=120, trials=2), cwd=path)
        other = write_eval(path / "other", running.base_url, rows=4, name="other")
        for model in ("small", "large"):
            holdfast("eval", other, "--model", model, cwd=path)
    return path


@pytest.fixture(scope="module")
def shown(folder: Path) -> Iterator[Viewer]:
    """The server that the tests ask."""
    with viewer(folder, home=folder / "home") as running:
        wait_for(lambda: ask(running, folder)["building"] is None, "the columns")
        yield running


def address(folder: Path) -> str:
    """Return the address of the table of the large run."""
    return f"/run/{run_dir(folder).name.rpartition('-')[2]}/trials"


def ask(shown: Viewer, folder: Path, query: str = "") -> Any:
    """Return a page of the table, once all rows have been searched."""

    def look() -> Any:
        page = shown.json(f"{address(folder)}.json?{query}")
        return page if page["complete"] else None

    return wait_for(look, "the search")


def test_a_filter_and_an_order_select_rows_in_pages(shown: Viewer, folder: Path) -> None:
    page = ask(shown, folder, "q=failed&sort=-sample&start=100&count=15")
    assert (page["selected"], page["total"], page["start"], len(page["rows"])) == (120, 240, 100, 15)
    assert {row["status"] for row in page["rows"]} == {"failed"}
    samples = [row["sample"] for row in page["rows"]]
    assert samples == sorted(samples, reverse=True)
    assert page["numbers"] == ["trial", "tokens", "seconds"]


def test_windows_are_cut_from_the_list_that_a_page_began_with(shown: Viewer, folder: Path) -> None:
    first = ask(shown, folder, "sort=sample&count=5")
    later = ask(shown, folder, f"sort=sample&count=5&start=5&generation={first['generation']}&facets=0")
    assert later["generation"] == first["generation"]
    assert later["facets"] == []
    assert not {row["row"] for row in first["rows"]} & {row["row"] for row in later["rows"]}


def test_a_facet_adds_its_condition_and_takes_it_away_again(shown: Viewer, folder: Path) -> None:
    status = ask(shown, folder, "q=sample%3Ds1")["facets"]
    assert status == []  # both trials of it failed: there is nothing to narrow down
    (group, *_) = ask(shown, folder)["facets"]
    failed = next(value for value in group["values"] if value["value"] == "failed")
    assert (group["name"], failed["count"], failed["query"], failed["chosen"]) == ("status", 120, "failed", False)
    (group, *_) = ask(shown, folder, "q=seconds>0+failed")["facets"]
    assert (group["values"][0]["query"], group["values"][0]["chosen"]) == ("seconds>0", True)
    (group, *_) = ask(shown, folder, "q=failed+or+passed")["facets"]
    assert {value["query"] for value in group["values"]} == {"(failed or passed) passed", "(failed or passed) failed"}


def test_a_mistake_has_a_place_and_a_hint(shown: Viewer, folder: Path) -> None:
    mistake = ask(shown, folder, "q=failed+seconds>soon")["mistake"]
    assert mistake["position"] == 15
    assert "seconds>0.5" in mistake["hint"]
    assert "cannot be compared with `soon`" in shown.get(f"{address(folder)}?q=seconds>soon").text
    assert shown.get(f"{address(folder)}.csv?q=seconds>soon").status == 400


@pytest.mark.parametrize(
    "query", ["start=-1", "start=99999999", "count=x", "generation=77", "sort=nothing", "start=1e9"]
)
def test_odd_numbers_in_an_address_do_no_harm(shown: Viewer, folder: Path, query: str) -> None:
    assert shown.get(f"{address(folder)}?{query}").status == 200


def test_rows_as_csv_are_all_rows_of_the_filter(shown: Viewer, folder: Path) -> None:
    answer = shown.get(f"{address(folder)}.csv?q=failed&sort=sample")
    rows = list(csv.DictReader(answer.text.splitlines()))
    assert len(rows) == 120
    assert rows[0]["sample"] == "s1"
    assert rows[0]["exact status"] == "failed"
    assert rows[0]["exact score"] == "0.0"
    assert rows[0]["preview"] == "question 1"


def test_without_scripts_the_table_has_pages(shown: Viewer, folder: Path) -> None:
    html = shown.get(f"{address(folder)}?start=100").text
    assert html.count("<tr role") == 101
    assert 'rel="prev"' in html
    assert 'rel="next"' in html
    assert 'aria-rowcount="241"' in html


def test_a_trial_knows_its_place_in_the_list_it_was_opened_from(shown: Viewer, folder: Path) -> None:
    run = address(folder).split("/")[2]
    page = shown.json(trial_address(run, "s3", 1, "failed", "").replace("/1?", "/1.json?"))
    around = page["neighbours"]
    assert (around["position"], around["count"]) == (3, 120)
    assert around["previous"] == trial_address(run, "s1", 2, "failed")
    assert around["next"] == trial_address(run, "s3", 2, "failed")
    assert around["up"] == f"/run/{run}/trials?q=failed"
    assert shown.json(trial_address(run, "s0", 1, "failed", "").replace("/1?", "/1.json?"))["neighbours"] is None


def test_the_list_of_runs_is_grouped_filtered_and_has_a_trend(shown: Viewer) -> None:
    page = shown.json("/index.json")
    assert [(group["name"], len(group["runs"])) for group in page["evals"]] == [("other", 2), ("e", 1)]
    assert [point["target"] for point in page["evals"][0]["trend"]] == ["small", "large"]
    assert page["evals"][1]["trend"] == []
    filtered = shown.json("/index.json?q=LARGE+finished")
    assert (filtered["selected"], filtered["total"]) == (1, 3)
    assert filtered["evals"][0]["runs"][0]["run"]["low"] is not None


def test_ticked_runs_lead_to_their_comparison(shown: Viewer) -> None:
    runs = [item["run"]["id"] for item in shown.json("/index.json?q=other")["evals"][0]["runs"]]
    answer = shown.get(f"/compare?run={runs[0]}&run={runs[1]}")
    assert (answer.status, answer.headers["Location"]) == (303, f"/compare/{runs[0]}/{runs[1]}")
    assert "needs two runs or more" in shown.get(f"/compare?run={runs[0]}").text
    assert shown.get(f"/compare?run={runs[0]}&run=ffff").status == 404
