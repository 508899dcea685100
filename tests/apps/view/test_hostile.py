"""A run with hostile text in every field: nothing of it is executed or fetched, and all of it can be read."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from holdfast.spec.schema import SCHEMA_VERSION
from tests.support.running import holdfast, server, wait_for, write_eval
from tests.support.viewing import Viewer, browser, opened, viewer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

__all__ = ["browser"]
pytestmark = pytest.mark.browser

TAG = "<img src=x onerror=alert(1)>"
SCRIPT = "</script></title><script>alert(2)</script>"
ATTRIBUTE = "\"' onfocus=alert(3) autofocus x=\"'"
TEMPLATE = "{{ 7 * 7 }} {% raw %}"
LINKS = "![x](https://evil.example/i.png) [y](javascript:alert(4)) <https://evil.example/> <iframe src=//evil.example>"
ENTITY = "&lt;b&gt; &amp;"
PAYLOADS = [TAG, SCRIPT, ATTRIBUTE, TEMPLATE, LINKS, ENTITY]
SAMPLES = [f"a/../{TAG}", SCRIPT, ATTRIBUTE, "broken" + TAG, ".json", "100% ?q=1#x", "nul-ctrl-\u202eesrever"]

AGENT = f"""\
from holdfast import Reply

PAYLOADS = {PAYLOADS!r}


def reply(prompt, context):
    text = "\\n\\n".join(PAYLOADS)
    if context.sample_id.startswith("broken"):
        raise ValueError(text)
    (context.workspace / ("f" + PAYLOADS[0].replace("/", "-") + ".html")).write_text(text)
    call = {{"id": PAYLOADS[2], "type": "function", "function": {{"name": PAYLOADS[0], "arguments": text}}}}
    return Reply(text=text, messages=[
        {{"role": "assistant", "content": text, "tool_calls": [call], "reasoning_content": text}},
        {{"role": "tool", "tool_call_id": PAYLOADS[2], "name": PAYLOADS[1], "content": text}},
        {{"role": PAYLOADS[0], "content": text}},
        {{"role": "assistant", "content": [
            {{"type": "text", "text": text}},
            {{"type": "image_url", "image_url": {{"url": "https://evil.example/i.png"}}}},
            {{"type": PAYLOADS[0]}},
        ]}},
    ])


def grade(output, **_):
    return {{"score": 0.0, "feedback": "\\n\\n".join(PAYLOADS), "details": {{PAYLOADS[0]: PAYLOADS}}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run."""
    path = tmp_path_factory.mktemp("hostile")
    (path / "agent.py").write_text(AGENT)
    (path / "files").mkdir()
    rows = [{"id": name, "question": "\n".join(PAYLOADS), "kind": TAG, SCRIPT: ATTRIBUTE} for name in SAMPLES]
    (path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {
        "schemaVersion": SCHEMA_VERSION,
        "name": TAG + SCRIPT,
        "dataset": {"path": "data.jsonl"},
        "target": {"python": "agent.py:reply"},
        "system": SCRIPT,
        "prompt": "{{ question }}",
        "workspace": {"folder": "files"},
        "follow_ups": ["{{ question }}"],
        "checkpoints": [{"after_turn": 1, "graders": [{"type": "python", "name": TAG, "function": "agent.py:grade"}]}],
        "graders": [{"type": "python", "name": "plain" + ATTRIBUTE, "function": "agent.py:grade"}],
        "by": ["kind"],
        "limits": {"retries": 0},
    }
    (path / "e.yaml").write_text(json.dumps(spec))
    holdfast("eval", "e.yaml", "--accept-errors", cwd=path)
    with server() as running:  # a target is named after its model
        holdfast("eval", write_eval(path / "other", running.base_url, rows=1), "--model", ATTRIBUTE + TAG, cwd=path)
    return path


@pytest.fixture(scope="module")
def shown(folder: Path) -> Iterator[Viewer]:
    """The server that the browser asks."""
    with viewer(folder, home=folder / "home") as running:
        run = run_of(running)
        wait_for(lambda: running.json(f"/run/{run}/trials.json")["building"] is None, "the columns")
        yield running


def run_of(shown: Viewer) -> str:
    """Return the id of the run of the agent."""
    runs = [item["run"] for group in shown.json("/index.json")["evals"] for item in group["runs"]]
    return next(run["id"] for run in runs if run["target"] == "agent.py:reply")


def test_lists_and_numbers_show_hostile_names_as_text(browser: Browser, shown: Viewer) -> None:
    run = run_of(shown)
    with opened(browser, shown) as page:
        for path in ("/", f"/run/{run}", f"/run/{run}/trials"):
            shown.get(path)  # until its content is there
            page.goto(shown.base + path)
            content = page.locator("main").inner_text()
            assert TAG + SCRIPT in content
            assert path != "/" or ATTRIBUTE + TAG in content
        page.locator(".virtual tbody a[href]").first.wait_for()
        cells = page.locator("td.sample").all_inner_texts()
        assert cells == [name.replace("\u202e", "\\u202e") for name in SAMPLES]


def test_a_trial_shows_hostile_text_raw_and_rendered(browser: Browser, shown: Viewer) -> None:
    run = run_of(shown)
    with opened(browser, shown) as page:
        as_markdown = product(["broken" + TAG, SCRIPT], ["?text=markdown"])  # all samples have the same text
        for sample, text in [*product(SAMPLES, [""]), *as_markdown]:
            page.goto(f"{shown.base}/run/{run}/trial/{quote(sample, safe='')}/1{text}")
            content = page.locator("main").inner_text()
            assert sample.replace("\u202e", "\\u202e") in content
            assert TAG in content, sample
            if not text:
                assert {payload for payload in PAYLOADS if payload not in content} == set(), sample
            active = page.locator("main img, main iframe, main script, main [onfocus], main [onerror]")
            assert active.count() == 0, sample


def test_a_row_of_the_list_leads_to_its_trial_whatever_its_name(browser: Browser, shown: Viewer) -> None:
    run = run_of(shown)
    with opened(browser, shown) as page:
        for place, sample in enumerate(SAMPLES):
            page.goto(f"{shown.base}/run/{run}/trials")
            page.locator(".virtual tbody a[href]").nth(place).click()
            page.locator("h1", has_text=sample[:5]).wait_for()
            assert f"{place + 1} of {len(SAMPLES)}" in page.locator("main").inner_text()


def test_files_and_lines_are_plain_text_that_runs_nothing(shown: Viewer) -> None:
    run = run_of(shown)
    line = shown.get(f"/run/{run}/trial/{quote(SCRIPT, safe='')}/1/line")
    assert line.headers["Content-Type"].startswith("text/plain")
    assert "sandbox" in line.headers["Content-Security-Policy"]
    assert line.headers["X-Content-Type-Options"] == "nosniff"


def test_rows_as_csv_are_a_download(shown: Viewer) -> None:
    answer = shown.get(f"/run/{run_of(shown)}/trials.csv?q=failed")
    assert answer.headers["Content-Disposition"].startswith("attachment")
    assert answer.text.splitlines()[0].startswith("status,sample,trial,score")
