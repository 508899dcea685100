"""`/jobs`: what was submitted to clusters, from this machine's registry and the files of invocations."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.cluster.remote.registry import InvocationRegistry
from holdfast.apps.cluster.remote.transport import Here
from tests.support.invocations import Launched, entry_of, launched, register
from tests.support.running import wait_for
from tests.support.viewing import Viewer, viewer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def invocation(tmp_path: Path) -> Launched:
    """An invocation on this machine: one task is finished, the other never began."""
    one = launched(Here(), tmp_path / "base", tasks=("gsm8k", "mmlu"), executor="local")
    one.state(phase="done", done=8, total=8, exit_code=0, updated=time.time())
    one.log("main-7-0.log", "first line\nall is <b>well</b>\n")
    register(one, tmp_path / "home", tasks=("gsm8k", "mmlu"))
    return one


@pytest.fixture
def shown(tmp_path: Path, invocation: Launched) -> Iterator[Viewer]:
    """A viewer without runs, which starts because there are jobs."""
    with viewer(tmp_path, home=tmp_path / "home") as running:
        yield running


def test_invocations_are_listed_with_their_tasks(shown: Viewer, invocation: Launched) -> None:
    page = wait_for(lambda: answered(shown, "/jobs.json"), "an answer")
    (picture,) = page["invocations"]
    assert [(task["name"], task["status"], task["done"]) for task in picture["tasks"]] == [
        ("gsm8k", "done", 8),
        ("mmlu", "unsubmitted", 0),
    ]
    assert f'href="/jobs/{invocation.id}"' in shown.get("/jobs").text


def test_an_invocation_shows_the_ends_of_its_logs(shown: Viewer, invocation: Launched) -> None:
    page = wait_for(lambda: answered(shown, f"/jobs/{invocation.id}.json"), "an answer")
    assert page["logs"] == [
        {"task": f"{invocation.id}.0", "file": "main-7-0.log", "lines": ["first line", "all is <b>well</b>"]}
    ]
    html = shown.get(f"/jobs/{invocation.id}").text
    assert "all is &lt;b&gt;well&lt;/b&gt;" in html
    assert f"holdfast resume {invocation.id}" in html


def test_an_unknown_invocation_is_a_page_that_offers_those_like_it(shown: Viewer, invocation: Launched) -> None:
    answer = shown.get(f"/jobs/{invocation.id[:6]}")
    assert answer.status == 404
    assert f'href="/jobs/{invocation.id}"' in answer.text


def test_a_cluster_that_does_not_answer_says_nothing_about_its_jobs(tmp_path: Path) -> None:
    one = launched(Here(), tmp_path / "base")
    InvocationRegistry(tmp_path / "home" / "invocations").add(entry_of(one, host="no-such-host.invalid"))
    with viewer(tmp_path, home=tmp_path / "home") as shown:
        page = wait_for(lambda: answered(shown, "/jobs.json"), "an answer")
        assert page["invocations"][0]["tasks"][0]["status"] == "unknown"
        html = shown.get("/jobs").text
        assert "The cluster does not answer" in html
        assert "As of" in html


def answered(shown: Viewer, path: str) -> dict[str, Any] | None:
    """Return a page once the cluster has been asked."""
    page = shown.json(path)
    return None if page["asking"] else page
