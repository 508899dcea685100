"""The pages of `holdfast view` in a real browser."""

from __future__ import annotations

import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.running import holdfast, server, wait_for, write_eval
from tests.support.serving import send, serving
from tests.support.showcase import agent_run
from tests.support.viewing import Viewer, browser, opened, viewer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page, Route

__all__ = ["browser"]
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of a shop assistant, whose milk becomes dear, and a run of many trials."""
    path = tmp_path_factory.mktemp("shown")
    for name, agent in (("one", ("", "")), ("two", ('"milk": 1', '"milk": 3'))):
        agent_run(path / name, agent=agent)
        holdfast("eval", "shop.yaml", "--accept-errors", cwd=path / name)
        shutil.copytree(path / name / "runs", path / "runs", dirs_exist_ok=True)
    with server() as running:
        file = write_eval(path, running.base_url, rows=700, name="many")
        holdfast("eval", file, cwd=path)
    return path


@pytest.fixture(scope="module")
def shown(folder: Path) -> Iterator[Viewer]:
    """The server that the browser asks."""
    with viewer(folder, home=folder / "home") as running:
        for eval_name in ("shop", "many"):  # so that no page is the one that is shown while a run is read
            for run in runs_of(running, eval_name):
                settle(running, run)
        yield running


def runs_of(shown: Viewer, name: str) -> list[str]:
    """Return the ids of an eval's runs, the oldest first."""
    runs = [item["run"] for group in shown.json("/index.json")["evals"] for item in group["runs"]]
    return [run["id"] for run in sorted(runs, key=lambda run: run["written"]) if run["name"] == name]


def settle(shown: Viewer, run: str) -> None:
    """Wait until a run has been read."""
    wait_for(lambda: shown.json(f"/run/{run}/trials.json?count=0")["building"] is None, "the run to be read")


def rows(page: Page) -> list[str]:
    """Return the samples of the rows that are shown."""
    return page.locator("[data-list] tbody td.sample").all_inner_texts()


def test_from_the_list_to_the_band_after_turn_two_by_keyboard(browser: Browser, shown: Viewer) -> None:
    first = runs_of(shown, "shop")[0]
    with opened(browser, shown) as page:
        page.get_by_role("link", name="agent.py:reply").last.focus()
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(f"/run/{first}$"))
        page.goto(f"{shown.base}/run/{first}/trials")
        page.keyboard.press("/")
        page.keyboard.type("checkpoint@2:failed", delay=5)
        page.keyboard.press("Enter")
        page.locator("[data-count]", has_text="1 of 4").wait_for()
        assert page.url.endswith("?q=checkpoint%402%3Afailed")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile("/trial/milk/1"))
        assert page.get_by_text("1 of 1", exact=True).is_visible()
        band = page.locator("#checkpoint-2")
        assert "failed" in band.inner_text()
        turn = page.locator("#turn-2").bounding_box()
        assert turn["y"] < band.bounding_box()["y"] < page.locator("#turn-3").bounding_box()["y"]
        page.keyboard.press("]")
        page.keyboard.press("]")
        page.locator("#checkpoint-2:focus").wait_for()
        page.keyboard.press("u")
        page.wait_for_url(re.compile(r"/trials\?q=checkpoint"))
        page.keyboard.press("g")
        page.keyboard.press("r")
        page.wait_for_url(f"{shown.base}/")


def test_next_and_previous_stay_within_the_filter(browser: Browser, shown: Viewer) -> None:
    run = runs_of(shown, "many")[0]
    with opened(browser, shown, f"/run/{run}/trials?q=failed&sort=-sample") as page:
        page.wait_for_selector(".virtual tbody a[href]")
        samples = rows(page)[:3]
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(f"/trial/{samples[1]}/1"))
        assert page.get_by_text("2 of 350", exact=True).is_visible()
        page.keyboard.press("j")
        page.wait_for_url(re.compile(f"/trial/{samples[2]}/1"))
        page.keyboard.press("k")
        page.wait_for_url(re.compile(f"/trial/{samples[1]}/1"))


def test_any_place_of_a_long_list_is_a_scroll_away_and_back_returns_to_it(browser: Browser, shown: Viewer) -> None:
    run = runs_of(shown, "many")[0]
    with opened(browser, shown, f"/run/{run}/trials") as page:
        page.wait_for_selector(".virtual tbody a[href]")
        assert page.locator("tbody tr").count() < 40
        page.locator("table[role=grid]").focus()
        page.keyboard.press("End")
        page.locator("tbody td.sample", has_text="s699").wait_for()
        last = page.locator("tbody tr[aria-selected=true]")
        assert last.get_attribute("aria-rowindex") == "701"
        assert page.locator("table[role=grid]").get_attribute("aria-activedescendant") == last.get_attribute("id")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile("/trial/s699/1"))
        page.go_back()
        page.locator("tbody td.sample", has_text="s699").wait_for()
        assert page.locator("tbody tr[aria-selected=true] td.sample").inner_text() == "s699"


def test_a_link_is_a_view(browser: Browser, shown: Viewer) -> None:
    run = runs_of(shown, "many")[0]
    with opened(browser, shown, f"/run/{run}/trials?q=sample%3Ds17&sort=-seconds") as page:
        page.wait_for_selector(".virtual tbody a[href]")
        assert rows(page) == ["s17"]
        assert page.get_by_label("Filter trials").input_value() == "sample=s17"
        assert page.locator("th[aria-sort=descending]").inner_text().startswith("seconds")


def test_facets_narrow_down_and_back_widens_again(browser: Browser, shown: Viewer) -> None:
    run = runs_of(shown, "many")[0]
    with opened(browser, shown, f"/run/{run}/trials") as page:
        page.locator("[data-facets] a", has_text="failed").first.click()
        page.wait_for_url(re.compile("q=failed"))
        assert page.locator("[data-facets] a[aria-current]").first.inner_text().split() == ["failed", "350"]
        page.go_back()
        page.locator("[data-count]", has_text="700 of 700").wait_for()


def test_a_mistake_in_the_filter_is_explained_and_words_are_completed(browser: Browser, shown: Viewer) -> None:
    run = runs_of(shown, "many")[0]
    with opened(browser, shown, f"/run/{run}/trials") as page:
        box = page.get_by_label("Filter trials")
        box.fill("nobody:failed")
        page.get_by_text("the run has no grader `nobody`").wait_for()
        assert box.get_attribute("aria-invalid") == "true"
        box.fill("")
        box.type("exact:fai", delay=5)
        page.get_by_role("option", name="exact:failed").wait_for()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.locator("[data-count]", has_text="350 of 700").wait_for()
        assert box.input_value() == "exact:failed "
        assert page.locator("[data-mistake]").is_hidden()


def test_ticked_runs_are_compared_and_a_flip_is_seen_side_by_side(browser: Browser, shown: Viewer) -> None:
    first, second = runs_of(shown, "shop")
    with opened(browser, shown) as page:
        for run in (first, second):
            page.locator(f"tr[data-run='{run}'] a").focus()
            page.keyboard.press("x")
        page.keyboard.press("c")
        page.wait_for_url(re.compile(rf"/compare/({first}/{second}|{second}/{first})$"))
        page.goto(f"{shown.base}/compare/{first}/{second}")
        page.get_by_role("link", name="checkpoint@2/dear").first.click()
        page.get_by_role("link", name=re.compile("^flips 1")).click()
        page.locator("main").get_by_role("link", name="milk", exact=True).click()
        page.wait_for_url(re.compile("/trial/milk/1"))
        for words in ("milk costs 1.", "milk costs 3."):
            page.locator("main").get_by_text(words).first.wait_for()
        page.go_back()
        page.get_by_role("link", name="milk", exact=True).wait_for()


def test_a_page_that_waits_loads_again_when_it_is_done(browser: Browser, shown: Viewer) -> None:
    address = f"/run/{runs_of(shown, 'many')[0]}/trials"
    module = '<script type="module" src="/static/wait.js"></script>'
    share = "0.25"

    def wait(route: Route) -> None:
        response = route.fetch()
        if not share:
            return route.fulfill(response=response)
        bar = f'<progress aria-label="Reading" data-wait value="{share}"></progress>'
        page = response.text().replace("</head>", f"{module}</head>").replace("<h1>", f"{bar}<h1>")
        return route.fulfill(response=response, body=page)

    with opened(browser, shown) as page:
        page.route(re.compile(f"{address}$"), wait)
        page.goto(shown.base + address)
        bar = page.locator("progress[data-wait]")
        bar.wait_for()
        share = "0.75"
        wait_for(lambda: bar.evaluate("bar => bar.value") == 0.75, "the progress to move")
        share = ""
        bar.wait_for(state="detached")
        assert len(rows(page)) > 0


def test_a_hidden_tab_closes_its_stream_and_opens_it_again(browser: Browser, shown: Viewer) -> None:
    hide = """hidden => {
        Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    streams = re.compile("/events/")
    with opened(browser, shown) as page:
        with page.expect_response(streams):
            page.reload()
        with page.expect_event("requestfailed", lambda request: streams.search(request.url) is not None):
            page.evaluate(hide, True)
        with page.expect_response(streams):
            page.evaluate(hide, False)


def test_the_keys_are_listed_and_none_works_where_text_is_typed(browser: Browser, shown: Viewer) -> None:
    with opened(browser, shown) as page:
        page.keyboard.press("?")
        assert page.locator("#keys").is_visible()
        page.keyboard.press("Escape")
        assert page.locator("#keys").is_hidden()
        page.keyboard.press("/")
        page.keyboard.type("?gr")
        assert page.get_by_label("Filter runs").input_value() == "?gr"
        assert page.locator("#keys").is_hidden()


def addresses(shown: Viewer) -> dict[str, str]:
    """Return an address of every kind of page, whose content is there: otherwise it would load again meanwhile."""
    first, second = runs_of(shown, "shop")
    paths = {
        "runs": "/",
        "jobs": "/jobs",
        "run": f"/run/{first}",
        "trials": f"/run/{first}/trials",
        "trial": f"/run/{first}/trial/salt/1",
        "compare": f"/compare/{first}/{second}?show=all",
        "beside": f"/compare/{first}/{second}/trial/milk/1",
        "several": f"/compare/{first}/{second}/{runs_of(shown, 'many')[0]}",
        "grid": "/suite",
        "missing": "/run/ffff/trials",
    }
    for path in paths.values():
        shown.get(path)
    return paths


def test_every_page_reads_without_scripts(browser: Browser, shown: Viewer) -> None:
    texts = {
        "runs": "agent.py:reply",
        "jobs": "No job was submitted",
        "run": "knows",
        "trials": "I do not know.",
        "trial": "ended here",
        "compare": "both pass",
        "beside": "Checkpoint after turn 2",
        "several": "have no sample in common",
        "grid": "agent.py:reply",
        "missing": "no run 'ffff'",
    }
    context = browser.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        page.goto(f"{shown.base}/open?key={shown.key}")
        for name, path in addresses(shown).items():
            response = page.goto(shown.base + path)
            assert response.status == (404 if name == "missing" else 200), name
            assert texts[name] in page.locator("main").inner_text(), name
    finally:
        context.close()


def test_every_page_is_accessible_in_both_schemes_and_fits_any_window(browser: Browser, shown: Viewer) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="there is no axe").Axe()
    with opened(browser, shown, expected="404 (Not Found)") as page:
        for name, path in addresses(shown).items():
            page.goto(shown.base + path)
            assert serious_violations(axe, page) == [], name
            for width in (320, 1600, 1280):
                page.set_viewport_size({"width": width, "height": 800})
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)


def serious_violations(axe: Any, page: Page) -> list[Any]:
    """Return what axe finds wrong with a page in a light and in a dark scheme, with the elements."""
    only_violations = {"resultTypes": ["violations"]}
    contrast = {"runOnly": ["color-contrast"]}  # which is all that a scheme changes
    page.emulate_media(color_scheme="dark")
    found = axe.run(page, options=only_violations | contrast).response["violations"]
    page.emulate_media(color_scheme="light")
    found += axe.run(page, options=only_violations).response["violations"]
    return [
        (violation["id"], [node["html"] for node in violation["nodes"]])
        for violation in found
        if violation["impact"] in ("serious", "critical")
    ]


@contextmanager
def elsewhere(html: str) -> Iterator[str]:
    """Serve a page of another site: to a browser, `localhost` and `127.0.0.1` are two."""

    with serving(lambda handler: send(handler, 200, html.encode(), kind="text/html")) as address:
        yield address.replace("127.0.0.1", "localhost") + "/"


def test_another_site_gets_nothing_but_its_links_can_be_followed(browser: Browser, shown: Viewer) -> None:
    run = runs_of(shown, "shop")[0]
    site = f"""<!doctype html><title>elsewhere</title>
        <img src="{shown.base}/static/icon.svg"><iframe src="{shown.base}/"></iframe>
        <a id="link" href="{shown.base}/run/{run}">look</a>
        <script>fetch("{shown.base}/index.json", {{mode: "no-cors", credentials: "include"}}).catch(() => 0)
        .finally(() => document.body.append("asked"))</script>"""
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(f"{shown.base}/open?key={shown.key}")
        page = context.new_page()
        answers: dict[str, int] = {}
        page.on("response", lambda response: answers.update({response.url: response.status}))
        with elsewhere(site) as address:
            page.goto(address)
            page.get_by_text("asked").wait_for()
        asked = {url: status for url, status in answers.items() if url.startswith(shown.base)}
        assert set(asked.values()) == {403}, asked
        page.locator("#link").click()
        page.wait_for_url(f"{shown.base}/run/{run}")
        assert "agent.py:reply" in page.locator("h1").inner_text()
    finally:
        context.close()
