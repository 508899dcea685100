"""Comparisons in the browser, and as a page to send."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.lab import Lab
from tests.support.running import Server, holdfast, module_server
from tests.support.viewing import Viewer, browser, opened, viewer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

__all__ = ["browser"]
provider = module_server()
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m"
SAMPLES = [f"s{number:02}" for number in range(14)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, provider: Server) -> Lab:
    """Two models that echo, of which the second adds a word; runs of them, of another eval, and an unfinished one."""
    rows: list[dict[str, Any]] = [
        {"id": each, "question": f"{each} {HOSTILE}", "expected": f"{each} {HOSTILE}", "kind": HOSTILE}
        for each in SAMPLES
    ]
    rows.append({"id": f"a/b {HOSTILE}", "question": "x", "expected": "y", "kind": "plain"})
    graders = [{"type": "exact", "name": "correct"}, {"type": "similarity", "name": "alike"}]
    lab = Lab(tmp_path_factory.mktemp("compared"), provider, rows=rows, spec={"graders": graders, "by": ["kind"]})
    lab.eval("-m", "one")
    lab.eval("-m", "two", "prompt={{ question }} Please.")
    lab.eval("-m", "one", "name=other", "--limit", 2)
    lab.eval("-m", "three", "--token-budget", 1, "--concurrency", 1, check=3)
    return lab


@pytest.fixture(scope="module")
def site(lab: Lab) -> Iterator[Viewer]:
    with viewer(lab.folder) as running:
        yield running


@pytest.fixture(scope="module")
def runs(lab: Lab) -> dict[str, str]:
    """Ids by target; `other` is the run of the other eval."""
    listed = json.loads(holdfast("ls", "--json", cwd=lab.folder).stdout)
    return {run["target"] if run["name"] == "e" else run["name"]: run["id"] for run in listed}


def test_the_page_has_what_the_command_says(site: Viewer, lab: Lab, runs: dict[str, str]) -> None:
    address = f"/compare/{runs['one']}/{runs['two']}"
    page = site.json(f"{address}.json")
    (told,) = json.loads(holdfast("compare", runs["one"], runs["two"], "--json", cwd=lab.folder).stdout)
    assert page["pairs"][0]["metrics"] == told["metrics"] and page["pairs"][0]["differences"] == told["differences"]
    assert page["counts"] == {"gained": 14, "lost": 0, "both": 0, "neither": 1}
    assert [row["sample"] for row in page["rows"]] == SAMPLES
    html = site.get(address).text
    assert "first is higher" in html and "would be detected 80 % of the time" in html and "McNemar, exact" in html
    assert f'href="{address}?metric=passed&amp;show=gained#samples"' in html
    assert "prompt changed" in html and "target.model one → two" in html


def test_samples_are_chosen_by_metric_and_kind_and_paged(site: Viewer, runs: dict[str, str]) -> None:
    address = f"/compare/{runs['one']}/{runs['two']}"
    assert [row["sample"][:3] for row in site.json(f"{address}.json?metric=correct&show=neither")["rows"]] == ["a/b"]
    graded = site.json(f"{address}.json?metric=alike&show=all")
    assert len(graded["points"]) >= 2 and len(graded["rows"]) == 15
    assert site.json(f"{address}.json?start=10&show=all")["start"] == 10
    assert site.json(f"{address}.json?start=99999999999&show=nonsense")["rows"] != []
    unknown = site.get(f"{address}?metric=grace")
    assert unknown.status == 404 and "no metric &#39;grace&#39;" in unknown.text


def test_both_conversations_stand_side_by_side(site: Viewer, runs: dict[str, str]) -> None:
    address = f"/compare/{runs['one']}/{runs['two']}"
    talk = site.json(f"{address}/trial/s03/1.json?metric=correct&show=gained")
    assert talk["position"] == 4 and talk["total"] == 14 and "s04/1?metric=correct&show=gained" in talk["next"]
    assert talk["talk"]["differs_at"] == [1, 0]
    html = site.get(f"{address}/trial/s03/1").text
    assert "<mark> Please.</mark>" in html and "The conversations differ from here on" in html
    odd = next(row for row in site.json(f"{address}.json?show=neither")["rows"])["sample"]
    link = re.search(rf'href="({address}/trial/a%2Fb[^"]+)"', site.get(f"{address}?show=neither").text)
    assert link is not None and site.get(link[1].replace("&amp;", "&")).status == 200
    assert odd == f"a/b {HOSTILE}"
    assert site.get(f"{address}/trial/nobody/1").status == 404 and site.get(f"{address}/trial/s03/2").status == 404


def test_three_runs_are_a_grid_and_evals_and_targets_another(site: Viewer, runs: dict[str, str], lab: Lab) -> None:
    page = site.json(f"/compare/{runs['one']}/{runs['two']}/{runs['other']}.json")
    assert len(page["pairs"]) == 2 and len(page["rows"]) == 15
    assert page["rows"][0]["cells"][2] is not None and page["rows"][-1]["cells"][2] is None
    grid = site.json("/suite.json")["grid"]
    assert grid["targets"] == ["one", "three", "two"] and [row["eval"] for row in grid["rows"]] == ["e", "other"]
    best, unfinished, worse = grid["rows"][0]["cells"]
    assert best["best"] and worse["differs"] and worse["adjusted"] < 0.05
    assert unfinished["run"]["score"] is None and unfinished["run"]["status"] == "unfinished"
    assert len(site.json(f"/suite/{runs['one']}/{runs['other']}.json")["grid"]["targets"]) == 1
    html = site.get("/suite").text
    assert f'href="/compare/{runs["one"]}/{runs["two"]}"' in html and "differs from the best of its eval" in html


@pytest.mark.parametrize(
    ("runs_of", "message"),
    [
        (["one", "three"], "is not finished"),
        (["one", "one"], "compared with itself"),
        (["one", "ffffffff"], "no run &#39;ffffffff&#39;"),
    ],
)
def test_the_page_explains_why_runs_cannot_be_compared(
    site: Viewer, runs: dict[str, str], runs_of: list[str], message: str
) -> None:
    answer = site.get("/compare/" + "/".join(runs.get(name, name) for name in runs_of))
    assert answer.status == 404 and message in answer.text


def test_nothing_of_a_dataset_or_a_model_is_markup(site: Viewer, runs: dict[str, str], lab: Lab) -> None:
    address = f"/compare/{runs['one']}/{runs['two']}"
    path = lab.folder / "sent.html"
    assert (
        holdfast("compare", runs["one"], runs["two"], "--to", "html", "-o", path, cwd=lab.folder).stdout == f"{path}\n"
    )
    pages = [site.get(f"{address}{rest}").text for rest in ("", "?metric=alike&show=all", "/trial/s03/1")]
    for html in (*pages, site.get("/suite").text, path.read_text()):
        assert "<script>alert" not in html and "<img src=x" not in html and "\x1b" not in html
    assert all("&lt;script&gt;alert(1)" in html and "\\x1b[31m" in html for html in (*pages, path.read_text()))


def test_a_comparison_to_send_is_one_file_with_the_conversations_of_flips(lab: Lab, runs: dict[str, str]) -> None:
    name = f"compare-{runs['one']}-{runs['two']}.html"
    assert holdfast("compare", runs["one"], runs["two"], "--to", "html", cwd=lab.folder).stdout == f"{name}\n"
    html = (lab.folder / name).read_text()
    assert html.count('<details class="flip">') == 14 and html.count("<mark> Please.</mark>") == 28
    assert not re.findall(r'(?:src|href)="(?!#)', html), "nothing outside of the file"
    assert "<script" not in html.replace("&lt;script", "") and "default-src 'none'" in html
    several = holdfast(
        "compare", *(runs[each] for each in ("one", "two", "other")), "--to", "html", "-o", "x.html", cwd=lab.folder
    )
    assert several.stdout == "x.html\n" and '<table class="heat">' in (lab.folder / "x.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "html", "--json"], "--to cannot be combined"),
        (["-o", "x.html"], "--output needs --to"),
        (["--to", "pdf"], "'pdf' is not 'html'"),
    ],
)
def test_options_that_do_not_fit_are_refused(lab: Lab, runs: dict[str, str], options: list[str], message: str) -> None:
    assert message in holdfast("compare", runs["one"], runs["two"], *options, cwd=lab.folder, check=2).stderr


def test_runs_that_share_no_sample_are_not_written(lab: Lab, runs: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "apart").mkdir()
    apart = Lab(tmp_path / "apart", lab.provider, rows=[{"id": "x", "question": "x", "expected": "x"}]).eval().run
    stderr = holdfast(
        "compare", lab.runs / "e" / f"one-{runs['one']}", apart, "--to", "html", cwd=tmp_path, check=2
    ).stderr
    assert "have no sample in common" in stderr and list(tmp_path.glob("*.html")) == []


@pytest.mark.browser
def test_from_flips_to_both_conversations_by_keyboard(browser: Browser, site: Viewer, runs: dict[str, str]) -> None:
    address = f"/compare/{runs['one']}/{runs['two']}"
    for query in ("metric=passed", "metric=passed&show=gained"):
        site.get(f"{address}?{query}")  # until it is there: a page that waits has no rows for the keys
    with opened(browser, site, f"{address}?metric=alike") as page:
        page.get_by_role("link", name="passed (all graders)").last.click()
        page.locator(".crossed .gained a").click()
        page.wait_for_url("**?metric=passed&show=gained#samples")
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url(f"**{address}/trial/s01/1?*")
        assert page.locator("mark").first.inner_text().strip() == "Please."
        page.keyboard.press("j")
        page.wait_for_url("**/trial/s02/1?*")
        assert "3 of 14" in page.locator("nav.around").inner_text()
        page.keyboard.press("u")
        page.wait_for_url(f"**{address}?metric=passed&show=gained#samples")
        page.go_back()
        page.wait_for_url("**/trial/s02/1?*")


@pytest.mark.browser
def test_a_comparison_to_send_unfolds_without_scripts_and_fits_a_phone(
    browser: Browser, lab: Lab, runs: dict[str, str]
) -> None:
    holdfast("compare", runs["one"], runs["two"], "--to", "html", "-o", "phone.html", cwd=lab.folder)
    context = browser.new_context(java_script_enabled=False, viewport={"width": 320, "height": 700})
    try:
        page = context.new_page()
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto((lab.folder / "phone.html").as_uri())
        page.locator("details.flip summary").first.click()
        assert page.locator("details.flip mark").first.is_visible()
        assert page.locator("main").bounding_box()["width"] <= 320
        assert len(requests) == 1, requests
    finally:
        context.close()
