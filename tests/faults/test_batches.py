"""Batches survive the death of the process at every step: nothing is paid for twice, and nothing is lost."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.batches import PROVIDERS, batch_server, prompt_of, run_batch, settings
from tests.support.breaking import (
    assert_each_once,
    kept,
    nothing_left,  # noqa: F401 - a fixture
)
from tests.support.providers import Call, Say
from tests.support.running import holdfast, lines, run_dir, start, wait_for, write_eval

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.batches import BatchServer

ROWS = 7
ACCOUNT = {
    "OPENAI_API_KEY": "sk-the-first-account",
    "HOLDFAST_BATCH_DOUBT_SECONDS": "0.5",
}
ONCE = Counter({f"question {number}": 1 for number in range(ROWS)})
APIS = ["chat", "messages"]


@pytest.fixture
def api() -> str:
    """Return the API of the provider, unless a test has several."""
    return "chat"


@pytest.fixture
def server(api: str) -> Iterator[BatchServer]:
    """Start a provider for one test."""
    with batch_server(api) as running:
        yield running


def write_batch_eval(folder: Path, server: BatchServer, *, batch: Any = True, rows: int = ROWS, **keys: Any) -> Path:
    """Write an eval whose target is asked in batches."""
    params = {"max_tokens": 100} if server.api == "messages" else {}
    target = {"model": "m", "base_url": server.url, "api": server.api, "batch": batch, "params": params}
    target |= keys.pop("target", {})
    return write_eval(folder, server.url, rows=rows, target=target, **keys)


def run(eval_file: Path, *arguments: str, check: int = 0, **env: str) -> Any:
    """Run the eval to its end, with the first account unless another is given."""
    return holdfast("eval", eval_file, *arguments, cwd=eval_file.parent, env={**ACCOUNT, **env}, check=check)


def kill_at(server: BatchServer, moment: str, step: str, eval_file: Path, *arguments: str, **env: str) -> None:
    """Run the eval, and kill its process at a step of the provider."""
    process = start("eval", eval_file, *arguments, cwd=eval_file.parent, env={**ACCOUNT, **env})
    arrived = threading.Event()

    def kill() -> None:
        process.kill()
        process.wait()
        arrived.set()

    getattr(server, moment)[step] = kill
    came = arrived.wait(120)
    process.kill()
    seen = process.communicate()
    assert came, seen


MOMENTS = {
    "before upload": ("before", "upload"),
    "between upload and its record": ("after", "upload"),
    "between upload and submit": ("before", "submit"),
    "between submit and its record": ("after", "submit"),
    "while polling": ("before", "look"),
    "while reading results": ("after", "results"),
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_killed_at_any_step_of_a_batch_pays_for_nothing_twice(
    moment: str, api: str, tmp_path: Path, server: BatchServer
) -> None:
    if api == "messages" and "upload" in MOMENTS[moment]:
        pytest.skip("Anthropic's batches are submitted without an upload")
    eval_file = write_batch_eval(tmp_path, server)
    kill_at(server, *MOMENTS[moment], eval_file)
    run(eval_file)
    assert server.billed == ONCE
    assert server.refused == []
    assert_each_once(run_dir(tmp_path), ROWS)


@pytest.mark.parametrize("api", APIS)
def test_every_process_is_killed_at_another_step_until_the_run_is_finished(
    api: str, tmp_path: Path, server: BatchServer
) -> None:
    server.holds = True
    eval_file = write_batch_eval(tmp_path, server)
    moments = [moment for moment in MOMENTS.values() if api == "chat" or moment[1] != "upload"]
    for moment, step in moments:
        if step == "results" or (api == "messages" and step == "look"):
            server.release()  # message batches say only in their results whose they are
        kill_at(server, moment, step, eval_file)
    run(eval_file)
    assert server.billed == ONCE
    assert_each_once(run_dir(tmp_path), ROWS)


@pytest.mark.parametrize("how", ["waiting", "submitting"])
def test_ctrl_c_stops_at_once_while_a_batch_is_waited_for(how: str, tmp_path: Path, server: BatchServer) -> None:
    """A submission that is under way is completed: it is known to the next process."""
    server.holds = True
    eval_file = write_batch_eval(tmp_path, server)
    process = start("eval", eval_file, cwd=tmp_path, env=ACCOUNT)

    def log() -> str:
        return "".join(path.read_text() for path in tmp_path.glob("runs/e/*/run.log"))

    def stop() -> None:
        process.send_signal(signal.SIGINT)
        wait_for(lambda: " stopping\n" in log(), "the run to know")

    if how == "submitting":
        server.during["submit"] = stop
    else:
        wait_for(lambda: "submitted batch" in log(), "the batch")
        stop()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, (out, err)
    assert "in flight" not in err and "submitted batch batch_1" in err
    server.release()
    assert "batch_1 was submitted before" not in run(eval_file).stderr, "nobody has to find it"
    assert len(server.batches) == 1 and server.billed == ONCE


@pytest.mark.parametrize("api", APIS)
def test_a_batch_of_unknown_fate_is_not_submitted_again_while_it_may_be_running(
    tmp_path: Path, server: BatchServer
) -> None:
    """The provider of message batches shows whose a batch is only in its results."""
    server.holds = True
    eval_file = write_batch_eval(tmp_path, server)
    kill_at(server, "after", "submit", eval_file)
    left = run(eval_file, "--no-wait", check=5)
    assert len(server.batches) == 1, left
    server.release()
    run(eval_file)
    assert server.billed == ONCE


def test_a_submission_whose_answer_is_lost_is_found_again_by_the_same_process(
    tmp_path: Path, server: BatchServer
) -> None:
    eval_file = write_batch_eval(tmp_path, server)
    server.after["submit"] = lambda: None  # the connection is closed without an answer
    seen = run(eval_file).stderr
    assert "it is unknown whether a batch was submitted" in seen
    assert server.billed == ONCE and len(server.batches) == 1


@pytest.mark.parametrize("step", ["upload", "submit", "look", "results"])
def test_a_failing_provider_is_asked_again(step: str, tmp_path: Path, server: BatchServer) -> None:
    server.status[step] = 500
    run(write_batch_eval(tmp_path, server))
    assert server.billed == ONCE


def test_a_second_process_is_refused_while_the_first_waits_for_its_batch(tmp_path: Path, server: BatchServer) -> None:
    server.holds = True
    eval_file = write_batch_eval(tmp_path, server)
    first = start("eval", eval_file, cwd=tmp_path, env=ACCOUNT)
    wait_for(lambda: server.batches, "the batch")
    run(eval_file, check=4)
    server.release()
    assert first.wait(120) == 0, first.communicate()
    first.communicate()
    assert server.billed == ONCE


def test_workers_take_over_the_batch_of_one_that_was_killed(tmp_path: Path, server: BatchServer) -> None:
    server.holds = True
    eval_file = write_batch_eval(tmp_path, server)
    kill_at(server, "after", "look", eval_file, "--workers", "2")
    assert list(run_dir(tmp_path).glob("workers/*/batches.jsonl"))
    server.release()
    run(eval_file, "--workers", "2", "--wait")  # the workers of the killed process are still ending
    assert server.billed == ONCE
    assert_each_once(run_dir(tmp_path), ROWS)


@pytest.mark.parametrize("api", APIS)
def test_replies_of_an_expired_batch_count_and_the_rest_goes_into_the_next(tmp_path: Path, server: BatchServer) -> None:
    server.leaves_out = {"question 2", "question 5"}
    run(write_batch_eval(tmp_path, server))
    assert server.billed == ONCE
    assert [len(batch.lines) for batch in server.batches] == [ROWS, 2]
    assert not server.alone
    assert kept(run_dir(tmp_path), "errors") == []


def test_requests_that_a_batch_leaves_out_are_sent_live_if_asked_for_even_by_a_later_process(
    tmp_path: Path, server: BatchServer
) -> None:
    server.leaves_out = {"question 2"}
    eval_file = write_batch_eval(tmp_path, server, batch={"then": "live"})
    kill_at(server, "before", "look", eval_file)
    run(eval_file)
    assert server.billed == ONCE
    assert server.alone == {"question 2": 1}


def test_a_batch_that_takes_too_long_is_cancelled_before_its_requests_are_asked_live(
    tmp_path: Path, server: BatchServer
) -> None:
    server.holds = True
    run(write_batch_eval(tmp_path, server, batch={"max_wait": "1s", "then": "live"}))
    assert server.cancelled == ["batch_1"]
    # The provider had run all of them when it was told to stop: what a cancelled batch holds counts.
    assert server.billed == ONCE and not server.alone


def test_a_batch_that_somebody_cancelled_stops_the_run(tmp_path: Path, server: BatchServer) -> None:
    server.leaves_out, server.holds = {"question 1"}, True
    eval_file = write_batch_eval(tmp_path, server)
    run(eval_file, "--no-wait", check=5)
    server.batches[0].status, server.holds = "cancelled", False
    seen = run(eval_file, check=3).stdout
    assert "batch batch_1 was cancelled before 1 of its requests were answered" in seen
    run(eval_file)
    assert server.billed == ONCE


@pytest.mark.parametrize("api", APIS)
def test_errors_inside_a_batch_equal_errors_of_live_requests(tmp_path: Path, server: BatchServer) -> None:
    server.refuses = {"question 1": 400, "question 2": 500}
    eval_file = write_batch_eval(tmp_path, server, limits={"retries": 1})
    run(eval_file, check=3)
    errors = [(error["sample"], error["kind"], error["status"]) for error in kept(run_dir(tmp_path), "errors")]
    assert sorted(errors) == [("s1", "bad_request", 400), ("s2", "server", 500), ("s2", "server", 500)]
    assert [len(batch.lines) for batch in server.batches] == [ROWS, 1]
    server.refuses = {}
    run(eval_file)
    assert server.billed == ONCE


def test_another_account_does_not_submit_again_what_the_first_is_waiting_for(
    tmp_path: Path, server: BatchServer
) -> None:
    server.holds = True
    eval_file = write_batch_eval(tmp_path, server)
    run(eval_file, "--no-wait", check=5)
    seen = run(eval_file, check=3, OPENAI_API_KEY="sk-the-second-account").stdout
    assert "batch batch_1 (7 requests)" in seen and "this account does not see it" in seen
    assert "sk-the" not in seen
    assert len(server.batches) == 1
    server.release()
    run(eval_file)
    assert server.billed == ONCE


def test_a_batch_that_was_given_up_is_paid_for_once_more(tmp_path: Path, server: BatchServer) -> None:
    server.holds = True
    eval_file = write_batch_eval(tmp_path, server)
    run(eval_file, "--no-wait", check=5)
    shown = holdfast("batches", run_dir(tmp_path), cwd=tmp_path).stdout
    assert shown.startswith("batch_1  7 requests of target") and shown.endswith("under way\n")
    shown = holdfast("batches", run_dir(tmp_path), "--abandon", cwd=tmp_path).stdout
    assert shown.endswith("abandoned: given up by the user\n")
    server.release()
    run(eval_file, OPENAI_API_KEY="sk-the-second-account")
    assert set(server.billed.values()) == {2}


def test_keys_are_in_no_file(tmp_path: Path, server: BatchServer) -> None:
    run(write_batch_eval(tmp_path, server))
    written = b"".join(path.read_bytes() for path in run_dir(tmp_path).rglob("*") if path.is_file())
    assert b"sk-the-first-account" not in written
    assert b"batch_1" in written


def answer_after_two_tools(body: dict[str, Any]) -> Say:
    """Call the tool twice, then answer with the question."""
    results = [message for message in body["messages"] if message["role"] == "tool"]
    if len(results) < 2:
        return Say(calls=(Call("price", {"thing": f"tea {len(results)}"}),))
    return Say(next(message["content"] for message in body["messages"] if message["role"] == "user"))


TOOL = {
    "name": "price",
    "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}},
    "responses": [{"result": 3}],
}


@pytest.mark.parametrize("killed", [False, True])
def test_a_tool_loop_advances_one_wave_per_batch(killed: bool, tmp_path: Path) -> None:
    with batch_server(answer=answer_after_two_tools) as server:
        eval_file = write_batch_eval(tmp_path, server, target={"tools": [{"scripted": TOOL}]})
        if killed:
            for _ in range(3):
                kill_at(server, "after", "submit", eval_file)
        run(eval_file)
        assert [len(batch.lines) for batch in server.batches] == [ROWS] * 3
        assert sum(server.billed.values()) == 3 * ROWS
        assert_each_once(run_dir(tmp_path), ROWS)
        assert all(output["output"].startswith("question") for output in kept(run_dir(tmp_path)))


def test_a_conversation_advances_one_turn_per_batch_and_resumes(tmp_path: Path, server: BatchServer) -> None:
    eval_file = write_batch_eval(tmp_path, server, follow_ups=["and then?", "why?"])
    for _ in range(3):
        kill_at(server, "before", "look", eval_file)
    run(eval_file)
    assert [len(batch.lines) for batch in server.batches] == [ROWS] * 3
    assert_each_once(run_dir(tmp_path), ROWS)


def judged(body: dict[str, Any]) -> Say:
    """Answer the target's questions, and judge."""
    if body["messages"][0]["role"] == "system":
        return Say(json.dumps({"reason": "fine", "score": 1.0}))
    return Say(prompt_of(body))


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("target_too", [False, True])
def test_judges_are_asked_in_batches(target_too: bool, killed: bool, tmp_path: Path) -> None:
    with batch_server(answer=judged) as server:
        grader = {"type": "prompt", "name": "good", "rubric": "Is it good?", "batch": True}
        eval_file = write_batch_eval(tmp_path, server, batch=target_too, graders=[grader])
        if killed:
            kill_at(server, "after", "results", eval_file)
            kill_at(server, "after", "submit", eval_file) if target_too else None
        run(eval_file)
        assert sum(server.billed.values()) == 2 * ROWS
        assert set(server.billed.values()) == {1}
        assert [len(batch.lines) for batch in server.batches] == [ROWS] * (1 + target_too)
        assert_each_once(run_dir(tmp_path), ROWS)


def test_trials_of_one_sample_are_requests_of_their_own(tmp_path: Path, server: BatchServer) -> None:
    run(write_batch_eval(tmp_path, server, trials=3))
    assert set(server.billed.values()) == {3}
    assert len(kept(run_dir(tmp_path))) == 3 * ROWS


def test_a_run_goes_on_live_and_waits_for_what_is_in_a_batch_already(tmp_path: Path, server: BatchServer) -> None:
    server.leaves_out, server.holds = {"question 3"}, True
    eval_file = write_batch_eval(tmp_path, server)
    run(eval_file, "--no-wait", check=5)
    server.batches[0].status, server.holds = "expired", False
    run(eval_file, "target.batch=false")
    assert server.billed == ONCE
    assert server.alone == {"question 3": 1}


def test_many_requests_are_divided_among_batches(tmp_path: Path, server: BatchServer) -> None:
    run(write_batch_eval(tmp_path, server, batch={"size": 3}))
    assert [len(batch.lines) for batch in server.batches] == [3, 3, 1]
    assert server.billed == ONCE


def test_the_plan_says_how_many_batches_there_will_be(tmp_path: Path, server: BatchServer) -> None:
    eval_file = write_batch_eval(tmp_path, server, batch={"size": 3})
    assert run(eval_file, "--dry-run").stdout.endswith("7 requests in 3 batches\n")
    plain = run(eval_file, "--dry-run", "target.batch=true").stdout
    assert plain.endswith("7 requests in 1 batch\n")
    priced = run(eval_file, "--dry-run", "target.model=gpt-4o-mini").stdout
    assert re.search(r"7 requests in 3 batches, about <?\$\S+ instead of <?\$\S+\n$", priced), priced
    assert server.batches == []


def test_the_plan_says_how_many_waves_follow_each_other(tmp_path: Path, server: BatchServer) -> None:
    keys: dict[str, Any] = {"batch": {"size": 5}, "follow_ups": ["and then?", "why?"]}
    eval_file = write_batch_eval(tmp_path, server, target={"model": "gpt-4o-mini"}, **keys)
    shown = run(eval_file, "--dry-run").stdout
    line = r"21 requests in 6 batches, in 3 waves one after the other, about <?\$\S+ instead of <?\$\S+\n$"
    assert re.search(line, shown), shown
    planned = json.loads(run(eval_file, "--dry-run", "--json").stdout)["preview"]
    batching = planned["batching"]
    assert (batching["batches"], batching["waves"], planned["requests"]) == (6, 3, 21)
    assert batching["cost"] == pytest.approx(planned["cost"] / 2)
    server.holds = True
    assert "note: 21 requests in 6 batches" in run(eval_file, "--no-wait", check=5).stderr
    server.release()
    assert "requests in 6 batches" not in run(eval_file).stderr  # what is under way is paid for
    assert len(server.batches) == 6


def test_the_plan_of_a_tool_loop_says_at_least(tmp_path: Path) -> None:
    with batch_server(answer=answer_after_two_tools) as server:
        grader = {"type": "prompt", "name": "good", "rubric": "Is it good?", "batch": True, "votes": 3}
        keys: dict[str, Any] = {"target": {"tools": [{"scripted": TOOL}]}, "graders": [grader]}
        lines = run(write_batch_eval(tmp_path, server, **keys), "--dry-run").stdout.splitlines()
        assert lines[-2:] == [
            "at least 7 requests in 1 batch, and another wave for each further step or turn",
            "21 requests of judges in batches, after the outputs",
        ]


def test_answers_of_a_batch_cost_what_batches_cost(tmp_path: Path, server: BatchServer) -> None:
    eval_file = write_batch_eval(tmp_path, server, target={"model": "gpt-4o-mini"})
    run(eval_file)
    run(eval_file, "--fresh", "target.batch=false")
    alone = run_dir(tmp_path)
    batched = next((tmp_path / "runs" / "e" / "archived").iterdir())
    costs = [sum(output["usage"]["cost"] for output in kept(path)) for path in (batched, alone)]
    assert costs[0] == pytest.approx(costs[1] / 2)


def test_a_budget_is_checked_between_batches(tmp_path: Path, server: BatchServer) -> None:
    eval_file = write_batch_eval(tmp_path, server, batch={"size": 2}, limits={"token_budget": 50})
    run(eval_file, check=3)
    assert [len(batch.lines) for batch in server.batches] == [2, 2]


def test_a_batch_for_which_there_is_no_room_yet_is_submitted_later(tmp_path: Path, server: BatchServer) -> None:
    server.problem = {"code": "token_limit_exceeded", "message": "Enqueued token limit reached", "line": None}
    seen = run(write_batch_eval(tmp_path, server)).stderr
    assert "Enqueued token limit reached" in seen
    assert server.billed == ONCE


def test_a_batch_that_fails_because_of_one_line_is_submitted_without_it(tmp_path: Path, server: BatchServer) -> None:
    server.problem = {"code": "invalid_request", "message": "bad line", "line": 2}
    run(write_batch_eval(tmp_path, server), check=3)
    assert [error["sample"] for error in kept(run_dir(tmp_path), "errors")] == ["s1"]
    assert server.billed == ONCE - Counter({"question 1": 1})


def test_a_server_without_batches_stops_the_run_with_the_line_to_remove(tmp_path: Path, server: BatchServer) -> None:
    server.status["upload"] = 404
    seen = run(write_batch_eval(tmp_path, server), check=3).stdout
    assert "This server has no batches: remove `batch`" in seen


def test_waiting_says_what_it_waits_for_and_how_to_collect(tmp_path: Path, server: BatchServer) -> None:
    server.holds = True
    eval_file = write_batch_eval(tmp_path, server)
    left = run(eval_file, "--no-wait", "--display", "json", check=5)
    end = json.loads(left.stderr.splitlines()[-1])
    assert (end["exit_code"], end["reason"]) == (5, "waiting")
    assert "Collect the results with:\n  holdfast eval" in left.stdout
    assert "batch batch_1: 7 requests of target, submitted" in left.stdout
    shown = holdfast("status", run_dir(tmp_path), cwd=tmp_path).stdout
    assert "waiting for batch batch_1: 7 requests of target" in shown


def status(folder: Path, **env: str) -> Any:
    """Show the status of the run."""
    return holdfast("status", run_dir(folder), cwd=folder, env={**ACCOUNT, **env})


@pytest.mark.parametrize("api", APIS)
def test_status_shows_the_progress_of_batches_and_collects_finished_ones(tmp_path: Path, server: BatchServer) -> None:
    server.holds = True
    eval_file = write_batch_eval(tmp_path, server)
    run(eval_file, "--no-wait", check=5)
    shown = status(tmp_path)
    assert re.search(r"waiting for batch batch_1: 7 requests of target, submitted .* ago, 0 of 7 done\n", shown.stdout)
    server.release()
    shown = status(tmp_path)
    assert "batch batch_1 is " in shown.stdout and "7 of 7 requests have a result" in shown.stdout
    assert "waiting" not in shown.stdout and "Resume with: holdfast resume" in shown.stdout
    server.batches.clear()  # the provider deletes batches after some weeks
    run(eval_file)
    assert server.billed == ONCE
    assert_each_once(run_dir(tmp_path), ROWS)


def test_status_collects_batches_of_judges(tmp_path: Path) -> None:
    with batch_server(answer=judged) as server:
        server.holds = True
        grader = {"type": "prompt", "name": "good", "rubric": "Is it good?", "batch": True, "model": ["m", "n"]}
        eval_file = write_batch_eval(tmp_path, server, batch=False, graders=[grader])
        run(eval_file, "--no-wait", check=5)
        server.release()
        assert status(tmp_path).stdout.count("7 of 7 requests have a result") == 2
        server.batches.clear()
        run(eval_file)
        assert sum(server.billed.values()) == 3 * ROWS


@pytest.mark.parametrize("api", APIS)
def test_status_finds_a_batch_whose_submission_was_not_recorded(api: str, tmp_path: Path, server: BatchServer) -> None:
    server.holds = True
    eval_file = write_batch_eval(tmp_path, server)
    kill_at(server, "after", "submit", eval_file)
    shown = status(tmp_path).stdout
    assert ("0 of 7 done" if api == "chat" else "not found at the provider, which may not show it yet") in shown
    server.release()
    assert "7 of 7 requests have a result" in status(tmp_path).stdout
    run(eval_file)
    assert server.billed == ONCE and len(server.batches) == 1


def test_status_without_the_account_or_the_provider_shows_what_is_recorded(tmp_path: Path) -> None:
    with batch_server() as server:
        server.holds = True
        eval_file = write_batch_eval(tmp_path, server)
        run(eval_file, "--no-wait", check=5)
        assert "answered 404" in status(tmp_path, OPENAI_API_KEY="sk-the-second-account").stdout
    assert "7 requests of target" in (gone := status(tmp_path).stdout) and "refuses connections" in gone


def test_status_leaves_batches_to_the_process_that_waits_for_them(tmp_path: Path, server: BatchServer) -> None:
    server.holds = True
    eval_file = write_batch_eval(tmp_path, server)
    first = start("eval", eval_file, cwd=tmp_path, env=ACCOUNT)
    wait_for(lambda: server.batches and (run_dir(tmp_path) / "batches.jsonl").exists(), "the batch")
    assert "running: 0 of 7 trials" in status(tmp_path).stdout
    server.release()
    assert first.wait(120) == 0, first.communicate()
    first.communicate()
    assert server.billed == ONCE


def test_the_ledger_has_every_step_in_order(tmp_path: Path, server: BatchServer) -> None:
    run(write_batch_eval(tmp_path, server))
    steps = lines(run_dir(tmp_path) / "batches.jsonl")
    assert [step["step"] for step in steps] == ["intent", "uploaded", "submitted", "collected"]
    outputs = kept(run_dir(tmp_path))
    assert {name[:24] for name in steps[0]["requests"]} == {output["key"][7:31] for output in outputs}


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("killed", [False, True])
def test_providers_with_a_form_of_their_own_take_our_batches(name: str, killed: bool, tmp_path: Path) -> None:
    with batch_server(kind=PROVIDERS[name]) as server:
        server.leaves_out = {"question 4"}
        eval_file = write_eval(tmp_path, server.url, rows=ROWS, target={"model": PROVIDERS[name].model, "batch": True})
        variables: Any = settings(server)
        if killed:
            kill_at(server, "after", "submit", eval_file, **variables)
        run(eval_file, **variables)
        assert server.refused == []
        assert server.billed == ONCE
        assert [len(batch.lines) for batch in server.batches] == [ROWS, 1]
        assert_each_once(run_dir(tmp_path), ROWS)


def test_togethers_progress_is_shown_as_a_share(tmp_path: Path) -> None:
    with batch_server(kind=PROVIDERS["together"]) as server:
        server.holds = True
        eval_file = write_eval(tmp_path, server.url, rows=ROWS, target={"model": "together/m", "batch": True})
        run(eval_file, "--no-wait", check=5, **settings(server))
        assert "ago, 43% of 7 done" in status(tmp_path, **settings(server)).stdout


IN_FILES: dict[str, Any] = {"target": {"model": "org/m", "batch": {"via": "files"}}}


def file_command(text: str) -> str:
    """Return the command that a message names."""
    found = re.search(r"answer it with: (vllm run-batch .*)$", text, re.MULTILINE)
    assert found is not None, text
    return found[1]


def test_a_batch_in_a_file_is_answered_by_vllm_and_collected(tmp_path: Path) -> None:
    eval_file = write_eval(tmp_path, "", rows=ROWS, limits={"retries": 0}, **IN_FILES)
    assert "org/m is asked with files" in run(eval_file, "--dry-run").stdout
    written = run(eval_file, "--no-wait", check=5)
    command = file_command(written.stdout)
    assert command.endswith("--model org/m") and file_command(written.stderr) == command
    assert file_command(run(eval_file, "--no-wait", check=5).stdout) == command  # nothing is written twice
    run_batch(command, tmp_path, stop_after=3)
    assert "3 of 7 done; answer it with: vllm" in status(tmp_path).stdout
    run_batch(command, tmp_path, refuses="question 6")
    run(eval_file, check=3)
    errors = [(error["sample"], error["status"]) for error in kept(run_dir(tmp_path), "errors")]
    assert errors == [("s6", 400)] and "maximum context length" in kept(run_dir(tmp_path), "errors")[0]["message"]
    run_batch(file_command(run(eval_file, "--no-wait", check=5).stdout), tmp_path)
    run(eval_file)
    assert_each_once(run_dir(tmp_path), ROWS)


def test_a_process_that_waits_for_a_file_goes_on_when_it_is_complete(tmp_path: Path) -> None:
    eval_file = write_eval(tmp_path, "", rows=ROWS, follow_ups=["and then?"], **IN_FILES)
    process = start("eval", eval_file, cwd=tmp_path, env=ACCOUNT)
    answered: set[str] = set()

    def written() -> str | None:
        assert process.poll() is None, process.communicate()
        for path in tmp_path.glob("runs/*/*/batches/*.requests.jsonl"):
            if path.name not in answered:
                answered.add(path.name)
                return str(path)
        return None

    for _ in range(2):
        requests = wait_for(written, "a file of requests")
        answers = requests.replace(".requests.", ".answers.")
        run_batch(f"vllm run-batch -i {requests} -o {answers} --model org/m", tmp_path)
    assert process.wait(120) == 0, process.communicate()
    process.communicate()
    assert_each_once(run_dir(tmp_path), ROWS)


def test_a_removed_file_of_requests_is_a_cancelled_batch(tmp_path: Path) -> None:
    eval_file = write_eval(tmp_path, "", rows=ROWS, **IN_FILES)
    run(eval_file, "--no-wait", check=5)
    next((run_dir(tmp_path) / "batches").glob("*.requests.jsonl")).unlink()
    assert "was cancelled before 7 of its requests were answered" in run(eval_file, check=3).stdout
    run_batch(file_command(run(eval_file, "--no-wait", check=5).stdout), tmp_path)
    run(eval_file)
    assert_each_once(run_dir(tmp_path), ROWS)


def test_a_run_with_a_file_that_is_not_answered_does_not_go_on_without_it(tmp_path: Path, server: BatchServer) -> None:
    eval_file = write_eval(tmp_path, "", rows=ROWS, **IN_FILES)
    run(eval_file, "--no-wait", check=5)
    seen = run(eval_file, f"target.base_url={server.url}", "target.batch=false", check=3).stdout
    assert "was written to a file, whose answers are still to come" in seen and "via: files" in seen
    assert not server.billed


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ({"api": "responses", "batch": {"via": "files"}}, "files of batches are for the chat API"),
        ({"batch": {"via": "files", "then": "live"}}, "`then: live` needs a server"),
        ({"batch": {"via": "mail"}}, "via"),
    ],
)
def test_files_that_nobody_could_answer_are_refused(target: dict[str, Any], problem: str, tmp_path: Path) -> None:
    eval_file = write_eval(tmp_path, "", rows=ROWS, target={"model": "org/m", **target})
    assert problem in run(eval_file, check=2).stderr


@pytest.mark.parametrize("api", APIS)
def test_results_that_arrive_in_part_are_fetched_again_and_not_paid_for_again(
    tmp_path: Path, server: BatchServer
) -> None:
    server.cuts = 2
    shown = run(write_batch_eval(tmp_path, server)).stderr
    assert server.billed == ONCE and len(server.batches) == 1
    assert "have arrived; they are fetched again" in shown
    assert_each_once(run_dir(tmp_path), ROWS)


def test_replies_that_were_paid_for_and_never_arrived_make_the_cost_unknown(
    tmp_path: Path, server: BatchServer
) -> None:
    server.cuts = 3
    eval_file = write_batch_eval(tmp_path, server, prices={"m": {"input": 1, "output": 1}})
    shown = run(eval_file).stdout
    again = server.billed.total() - ROWS
    assert again and len(server.batches) == 2
    assert f"this run paid at least $0.0001: what {again} of its requests cost is unknown" in shown
    assert {error["usage"]["cost"] for error in lines(run_dir(tmp_path) / "errors.jsonl")} == {None}


@pytest.mark.parametrize("api", APIS)
def test_a_byte_order_mark_before_results_is_no_part_of_them(tmp_path: Path, server: BatchServer) -> None:
    server.mark = b"\xef\xbb\xbf"
    run(write_batch_eval(tmp_path, server))
    assert server.billed == ONCE
    assert_each_once(run_dir(tmp_path), ROWS)


@pytest.mark.parametrize("same", [True, False], ids=["same", "different"])
@pytest.mark.parametrize("api", APIS)
def test_two_answers_under_one_id_count_only_if_they_are_the_same(
    tmp_path: Path, same: bool, server: BatchServer
) -> None:

    def repeat() -> None:
        results = server.batches[0].results
        text = json.dumps(results[0])
        results.append(json.loads(text if same else text.replace('"question ', '"another question ')))

    server.during["results"] = repeat
    run(write_batch_eval(tmp_path, server))
    last = f"question {ROWS - 1}"
    assert server.billed == (ONCE if same else ONCE + Counter({last: 1}))
    outputs = {output["sample"]: output["output"] for output in kept(run_dir(tmp_path))}
    assert sorted(outputs.values()) == sorted(ONCE)
    errors = lines(run_dir(tmp_path) / "errors.jsonl")
    assert [error["kind"] for error in errors] == ([] if same else ["bad_reply"])
    assert same or "different answers to this request" in errors[0]["message"]
