"""Runs judged against each other: both orders, ties, resumed, and never a verdict that nobody gave."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.report.pairwise import Pair, bradley_terry
from tests.support.judges import Refuse, judges
from tests.support.running import holdfast as run_command
from tests.support.running import lines, start, wait_for
from tests.support.specs import command

ROWS = [{"id": str(number), "question": f"q{number}"} for number in range(6)]


def run(folder: Path, name: Any, say: Any) -> Any:
    done = holdfast.evaluate(
        name=name,
        samples=ROWS,
        prompt="{{ question }}",
        target={"command": ["printf", "%s", say]},
        graders=[],
        runs_dir=folder / "runs",
    )
    assert done.finished
    return str(done.path)


def answers(body: Any) -> Any:
    text = body["messages"][1]["content"]
    return [
        re.search(rf"<{name}-(\w+)>\n(.*)\n</{name}-\1>", text, re.S)[2] for name in ("first-answer", "second-answer")
    ]


def longer(body: Any) -> Any:
    """A judge that likes the longer answer."""
    first, second = answers(body)
    better = "tie" if len(first) == len(second) else "first" if len(first) > len(second) else "second"
    return json.dumps({"reason": "r", "better": better})


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def compare(judge: Any, *arguments: Any, **keys: Any) -> Any:
        block = {"model": "j", "base_url": judge.base_url, "rubric": "Better to {{ question }}?", **keys}
        (tmp_path / "judge.yaml").write_text(json.dumps(block))
        return command(monkeypatch, capsys, tmp_path, "compare", *arguments, "--judge", "judge.yaml")

    compare.folder = tmp_path  # type: ignore[attr-defined]
    return compare


def test_every_answer_is_judged_in_both_orders_and_nothing_twice(lab: Any) -> None:
    short, long = run(lab.folder, "a", "x"), run(lab.folder, "b", "xyz")
    with judges(longer) as judge:
        ended = lab(judge, long, short, "--json")
        assert ended.code == 0, ended.err
        report = json.loads(ended.out)
        (pair,) = report["pairs"]
        assert (pair["win_rate"], pair["wins"], pair["ties"], pair["losses"]) == (1, 6, 0, 0)
        assert pair["low"] < 1 and pair["agreement"] == 1 and report["first_shown"] == 0.5
        assert report["bradley_terry"] is None and report["coverage"] == 1
        assert len(judge.bodies) == 12
        assert {tuple(answers(body)) for body in judge.bodies} == {("x", "xyz"), ("xyz", "x")}
        asked = {re.search(r"Better to (q\d)\?", body["messages"][1]["content"])[1] for body in judge.bodies}
        assert asked == {row["question"] for row in ROWS}, "the rubric is a template over the row"
        swapped = lab(judge, short, long)
        assert swapped.code == 0 and "0.000" in swapped.out
        assert len(judge.bodies) == 12, "the same comparison the other way round asks nothing"


def test_a_position_bias_is_a_tie_and_is_shown(lab: Any) -> None:
    one, other = run(lab.folder, "a", "x"), run(lab.folder, "b", "y")
    with judges(lambda _: '{"reason": "r", "better": "first"}') as judge:
        report = json.loads(lab(judge, one, other, "--json").out)
        assert report["pairs"][0]["win_rate"] == 0.5 and report["pairs"][0]["ties"] == 6
        assert report["pairs"][0]["agreement"] == 0 and report["first_shown"] == 1
        assert "shown first won 100%" in lab(judge, one, other).out


def test_identical_answers_are_ties_that_cost_nothing(lab: Any) -> None:
    one, other = run(lab.folder, "a", "same"), run(lab.folder, "b", "same")
    with judges(longer) as judge:
        report = json.loads(lab(judge, one, other, "--json").out)
        assert report["pairs"][0]["identical"] == 6 and report["pairs"][0]["win_rate"] == 0.5
        assert not judge.bodies


def test_an_error_is_never_a_verdict_and_the_same_command_resumes(lab: Any) -> None:
    one, other = run(lab.folder, "a", "x"), run(lab.folder, "b", "xyz")
    broken = True

    def answer(body: Any) -> Any:
        if broken and "q3" in body["messages"][1]["content"]:
            raise Refuse(400, "content filter")
        return longer(body)

    with judges(answer) as judge:
        stopped = lab(judge, one, other)
        assert stopped.code == 3 and "win rate" not in stopped.out
        judged = len(judge.bodies)
        accepted = json.loads(lab(judge, one, other, "--json", "--accept-errors").out)
        assert accepted["pairs"][0]["samples"] == 5 and accepted["coverage"] == pytest.approx(10 / 12)
        broken = False
        before = len(judge.bodies)
        (verdicts,) = (path.parent for path in lab.folder.glob("runs/pairwise/*/manifest.json"))
        (verdicts / "metrics.json").unlink()
        report = json.loads(lab(judge, one, other, "--json").out)
        assert report["pairs"][0]["samples"] == 6 and report["pairs"][0]["win_rate"] == 0
        assert len(judge.bodies) - before == 2 and judged >= 12
        assert len(lines(verdicts / "outputs.jsonl")) == 12


def test_a_killed_comparison_resumes_and_repeats_only_requests_in_flight(lab: Any) -> None:
    one, other = run(lab.folder, "a", "x"), run(lab.folder, "b", "xyz")
    hold, held = threading.Event(), []

    def answer(body: Any) -> Any:
        if len(judge.bodies) > 6 and not hold.is_set():
            held.append(body)
            hold.wait()
        return longer(body)

    with judges(answer) as judge:
        block = {"model": "j", "base_url": judge.base_url, "limits": {"concurrency": 2}}
        (lab.folder / "judge.yaml").write_text(json.dumps(block))
        arguments = ["compare", one, other, "--judge", "judge.yaml"]
        process = start(*arguments, cwd=lab.folder)
        try:
            wait_for(lambda: len(held) == 2, "two requests in flight")
            (verdicts,) = (path.parent for path in lab.folder.glob("runs/pairwise/*/manifest.json"))
            wait_for(lambda: len(lines(verdicts / "outputs.jsonl")) == 6, "six verdicts on disk")
        finally:
            process.kill()
            hold.set()
            process.communicate()
        done = run_command(*arguments, "--json", cwd=lab.folder)
        assert json.loads(done.stdout)["pairs"][0]["losses"] == 6
        assert len(judge.bodies) == 12 + len(held)


def test_a_judge_is_shown_its_mistake_once_and_then_stopped(lab: Any) -> None:
    one, other = run(lab.folder, "a", "x"), run(lab.folder, "b", "xyz")
    with judges(lambda body: longer(body) if len(body["messages"]) > 2 else "the second") as judge:
        assert lab(judge, one, other).code == 0
        assert len(judge.bodies) == 24
    with judges(lambda _: '{"better": "third"}') as judge:
        ended = lab(judge, one, other, model="other")
        assert ended.code == 3 and "none of first, second, tie" in ended.out + ended.err


def test_more_than_two_runs_are_rated_and_a_further_run_asks_about_its_own_pairs_only(lab: Any) -> None:
    paths = [run(lab.folder, name, say) for name, say in (("a", "x"), ("b", "xyz"), ("c", "xy"))]
    with judges(longer) as judge:
        lab(judge, *paths[:2])
        assert len(judge.bodies) == 12
        report = json.loads(lab(judge, *paths, "--json").out)
        assert len(judge.bodies) == 36
        ratings = report["bradley_terry"]
        assert ratings[paths[1]] > ratings[paths[2]] > ratings[paths[0]]
        assert sum(ratings.values()) / 3 == pytest.approx(1000)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two runs, for comparisons that do not take place."""
    folder = tmp_path_factory.mktemp("finished")
    return run(folder, "a", "x"), run(folder, "b", "y")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model": None}, "judge"),
        ({"prompt": "p"}, "by a `rubric`"),
        ({"where": "false"}, "has no meaning for pairs"),
        ({"modle": "x"}, "unknown key"),
    ],
)
def test_an_invalid_judge_is_rejected_with_its_file(lab: Any, finished: tuple[str, str], keys: Any, words: str) -> None:
    with judges(longer) as judge:
        ended = lab(judge, *finished, **keys)
        assert ended.code == 2 and "judge.yaml" in ended.err and words in ended.err and not judge.bodies


def test_a_run_is_not_judged_against_itself(lab: Any, finished: tuple[str, str]) -> None:
    with judges(longer) as judge:
        assert "against itself" in lab(judge, finished[0], finished[0]).err


class TestRatings:
    def test_ratings_follow_the_odds(self) -> None:
        pair = Pair("a", "b")
        for number in range(10_000):
            pair.add(str(number), ("first", "second") if number % 11 else ("second", "first"))
        ratings = bradley_terry(["a", "b"], [pair])
        assert ratings["a"] - ratings["b"] == pytest.approx(400, abs=2)

    def test_a_run_that_wins_everything_has_a_finite_rating(self) -> None:
        pair = Pair("a", "b")
        pair.add("1", ("first", "second"))
        assert bradley_terry(["a", "b"], [pair])["a"] < 1200

    def test_split_and_half_verdicts_count_by_halves(self) -> None:
        pair = Pair("a", "b")
        pair.add("1", ("first", "tie"))
        pair.add("2", ("first", "first"))
        assert pair.points == {"1": [0.75], "2": [0.5]} and pair.agreed == 0
        assert pair.summary()["wins"] == 1 and pair.summary()["ties"] == 1
