"""Several judges and votes: each vote is a grade of its own, and their combination is computed where it is read."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.errors import ConfigError
from holdfast.plan.plan import combine_scores, combine_votes
from holdfast.report.tally import AgreementTally
from holdfast.report.trials import Judged
from holdfast.store.heads import VerdictRef
from tests.support.judges import Judges, Refuse, judges
from tests.support.running import holdfast as run_command
from tests.support.running import lines, start
from tests.support.specs import command, load, write_spec

if TYPE_CHECKING:
    from pathlib import Path

SCORES = {"a": 1.0, "b": 0.6, "c": 0.2}


def vote(body: Any) -> str:
    return json.dumps({"reason": f"{body['model']} says so", "score": SCORES[body["model"]]})


def spec_of(served: Judges, rows: int = 2, **judge: Any) -> dict[str, Any]:
    block = {"type": "prompt", "name": "panel", "rubric": "Good?", "base_url": served.base_url, **judge}
    return {
        "name": "voted",
        "samples": [{"id": str(number)} for number in range(rows)],
        "prompt": "hello {{ id }}",
        "target": {"command": ["echo", "said"]},
        "graders": [block],
    }


def asked(served: Judges) -> Counter[str]:
    return Counter(body["model"] for body in served.bodies)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class TestPanels:
    @pytest.mark.parametrize(
        ("combine", "score"), [("mean", 0.6), ("median", 0.6), ("min", 0.2), ("majority", 1.0)], ids=str
    )
    def test_a_panel_has_one_verdict_and_each_judge_its_own(self, combine: str, score: float) -> None:
        with judges(vote) as served:
            run = holdfast.evaluate(**spec_of(served, model=["a", "b", "c"], combine=combine))
        assert asked(served) == {"a": 2, "b": 2, "c": 2}
        assert run.score == pytest.approx(score)
        graders = run.metrics.graders
        assert [graders[f"panel/{name}"].score for name in "abc"] == pytest.approx([1.0, 0.6, 0.2])
        assert graders["panel/a"].weight == 0
        agreement = graders["panel"].agreement
        assert agreement is not None and agreement.equal == 0 and agreement.outputs == 2
        grades = lines(run.path / "grades.jsonl")
        assert Counter(grade["grader"] for grade in grades) == {"panel/a": 2, "panel/b": 2, "panel/c": 2}
        assert len({(grade["key"], grade["by"]) for grade in grades}) == 6

    def test_a_judge_of_a_panel_may_have_its_own_server_and_parameters(self) -> None:
        with judges(vote) as served, judges(vote) as other:
            own = {"model": "b", "base_url": other.base_url, "params": {"seed": 2, "top_p": 1}}
            twice = {"model": "b", "name": "warm", "params": {"temperature": 1}}
            spec = spec_of(served, model=["a", own, twice], params={"seed": 1})
            run = holdfast.evaluate(**spec)
            assert asked(served) == {"a": 2, "b": 2} and asked(other) == {"b": 2}
            assert {(body["seed"], body["top_p"]) for body in other.bodies} == {(2, 1)}
            assert {body["seed"] for body in served.bodies} == {1}
            assert {body.get("temperature") for body in served.bodies if body["model"] == "b"} == {1}
            assert {"panel/a", "panel/b", "panel/warm", "panel"} == set(run.metrics.graders)
            # Where a judge is asked is in no key, and neither is its name.
            own["base_url"], twice["name"] = served.base_url, "hot"
            again = holdfast.evaluate(**spec)
            assert len(served.bodies) == 4 and len(other.bodies) == 2
        assert again.metrics.graders["panel/hot"].n == 2

    @pytest.mark.parametrize(
        ("model", "problem"),
        [
            (["a", {"model": "a", "params": {"seed": 1}}], "names a judge twice"),
            ([{"base_url": "http://127.0.0.1:1/v1"}], "model"),
            ([{"model": "a", "temperature": 1}], r"model\[0\]\.temperature: unknown key; parameters .* `params`"),
            (["a", {"modle": "b"}], r"model\[1\]\.modle: unknown key \(did you mean 'model'\?\)"),
            ({"model": "a"}, "model"),
        ],
    )
    def test_a_judge_that_cannot_be_told_apart_or_asked_is_refused(self, model: Any, problem: str) -> None:
        with judges(vote) as served, pytest.raises(ConfigError, match=problem) as caught:
            holdfast.evaluate(**spec_of(served, model=model))
        assert "should be text, not a list" not in str(caught.value)

    def test_results_and_metrics_have_the_combined_verdict(self) -> None:
        with judges(vote) as served:
            run = holdfast.evaluate(**spec_of(served, rows=1, model=["a", "c"]))
        written = json.loads((run.path / "metrics.json").read_text())["metrics"]["panel"]
        assert written["combine"] == "mean" and written["agreement"] == {"alpha": 0.0, "equal": 0.0, "outputs": 1}
        [trial] = json.loads((run.path / "results.json").read_text())["trials"]
        assert trial["grades"]["panel"] == {"status": "passed", "score": 0.6}
        assert trial["grades"]["panel/c"] == {"status": "failed", "score": 0.2}
        [trial] = run.results()
        assert trial["grades"]["panel"]["feedback"] == "panel/a: a says so; panel/c: c says so"

    def test_votes_of_one_judge_are_asked_one_by_one(self) -> None:
        answers = itertools.count()
        with judges(lambda _: json.dumps({"reason": "r", "score": next(answers) % 2})) as served:
            run = holdfast.evaluate(**spec_of(served, rows=1, model="a", votes=3, combine="majority"))
        assert asked(served) == {"a": 3} and run.finished
        names = {grade["grader"] for grade in lines(run.path / "grades.jsonl")}
        assert names == {"panel/a", "panel/a#2", "panel/a#3"}

    def test_a_single_judge_who_votes_once_is_an_ordinary_grader(self, tmp_path: Path) -> None:
        plain = load(tmp_path, graders=[{"type": "prompt", "rubric": "r", "model": "a"}])
        alone = load(tmp_path, graders=[{"type": "prompt", "rubric": "r", "model": ["a"]}])
        assert [grader.identity() for grader in plain.graders] == [grader.identity() for grader in alone.graders]

    @pytest.mark.parametrize(
        ("keys", "reason"),
        [
            ({"model": ["a", "a"]}, "names a judge twice"),
            ({"model": "a", "combine": "min"}, "for several judges"),
            ({"model": []}, "needs at least 1 item"),
        ],
    )
    def test_a_panel_without_several_different_votes_is_refused(
        self, tmp_path: Path, keys: dict[str, Any], reason: str
    ) -> None:
        with pytest.raises(holdfast.HoldfastError, match=reason):
            load(tmp_path, graders=[{"type": "prompt", "rubric": "r", **keys}])


class TestOnlyWhatIsMissing:
    def test_a_judge_that_is_added_is_the_only_one_asked(self) -> None:
        with judges(vote) as served:
            holdfast.evaluate(**spec_of(served, model="a"))
            holdfast.evaluate(**spec_of(served, model=["a", "b"]))
            assert asked(served) == {"a": 2, "b": 2}
            holdfast.evaluate(**spec_of(served, model=["a", "b"], votes=2))
            assert asked(served) == {"a": 4, "b": 4}

    def test_another_way_to_combine_asks_nobody(self) -> None:
        with judges(vote) as served:
            first = holdfast.evaluate(**spec_of(served, model=["a", "c"]))
            second = holdfast.evaluate(**spec_of(served, model=["a", "c"], combine="min"))
            assert asked(served) == {"a": 2, "c": 2}
        assert first.path == second.path
        assert (first.score, second.score) == (0.6, 0.2)

    def test_a_dead_judge_leaves_a_pending_vote_and_not_a_lost_panel(self) -> None:
        alive = False

        def answer(body: Any) -> str:
            if body["model"] == "b" and not alive:
                raise Refuse(401, "no such key")
            return vote(body)

        with judges(answer) as served:
            first = holdfast.evaluate(**spec_of(served, model=["a", "b", "c"]))
            assert not first.finished and first.exit_code == 3
            assert Counter(grade["grader"] for grade in lines(first.path / "grades.jsonl")) == {
                "panel/a": 2,
                "panel/c": 2,
            }
            before, alive = asked(served), True
            second = holdfast.evaluate(**spec_of(served, model=["a", "b", "c"]))
            assert second.finished and second.score == pytest.approx(0.6)
            assert asked(served) - before == {"b": 2}

    def test_a_killed_run_asks_only_for_the_missing_votes(self, tmp_path: Path) -> None:
        process: Any = None

        def answer(body: Any) -> str:
            if len(served.bodies) == 4 and process is not None:
                process.kill()
            return vote(body)

        with judges(answer) as served:
            spec = spec_of(served, rows=3, model=["a", "b"])
            path = write_spec(tmp_path, **{**spec, "limits": {"concurrency": 1}})
            with start("eval", path, cwd=tmp_path) as process:
                process.wait()
            [grades] = tmp_path.glob("runs/*/*/grades.jsonl")
            kept = len(lines(grades))
            assert 1 <= kept < 6
            before = len(served.bodies)
            process = None
            run_command("eval", path, cwd=tmp_path)
            assert len(served.bodies) - before == 6 - kept
            assert len(lines(grades)) == 6


def test_a_checkpoint_stops_by_the_combined_verdict(tmp_path: Path) -> None:
    with judges(vote) as served:
        spec = spec_of(served, rows=1, model=["a", "c"])
        judge = spec["graders"].pop()
        for threshold, turns in ((0.5, 2), (0.9, 1)):
            checkpoint = {"after_turn": 1, "on_failure": "stop", "graders": [{**judge, "threshold": threshold}]}
            runs_dir = tmp_path / f"runs-{turns}"
            run = holdfast.evaluate(**spec, follow_ups=["more"], checkpoints=[checkpoint], runs_dir=runs_dir)
            [output] = lines(run.path / "outputs.jsonl")
            assert run.finished and output["turns"] == turns
        assert asked(served) == {"a": 2, "c": 2}


def test_a_panel_is_shown_compared_and_gated_like_any_grader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with judges(vote) as served:
        run = holdfast.evaluate(**spec_of(served, model=["a", "c"]))
    shown = command(monkeypatch, capsys, tmp_path, "show", run.path, "0").out
    assert "panel/a: a says so" in shown
    assert command(monkeypatch, capsys, tmp_path, "gate", run.path, "--min", "panel=0.7").code == 1
    assert command(monkeypatch, capsys, tmp_path, "gate", run.path, "--min", "panel=0.5").code == 0
    assert command(monkeypatch, capsys, tmp_path, "compare", run.path, run.path).code == 0


scores = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=7)


class TestCombining:
    @given(scores)
    def test_every_rule_gives_a_score_between_the_lowest_and_the_highest(self, votes: list[float]) -> None:
        for rule in ("mean", "median", "min"):
            assert min(votes) <= combine_scores(votes, rule, 0.5) <= max(votes)
        assert combine_scores(votes, "majority", 0.5) == (sum(vote >= 0.5 for vote in votes) > len(votes) / 2)

    @given(scores, st.randoms(use_true_random=False))
    def test_the_order_of_judges_does_not_matter(self, votes: list[float], random: Any) -> None:
        shuffled = random.sample(votes, len(votes))
        for rule in ("mean", "median", "min", "majority"):
            assert combine_scores(votes, rule, 0.5) == pytest.approx(combine_scores(shuffled, rule, 0.5))

    def test_a_missing_vote_gives_no_verdict_and_a_failed_vote_an_error(self) -> None:
        good, bad = VerdictRef("passed", 1.0, None), VerdictRef("error", None, None)
        assert combine_votes([good, None], "mean", 0.5) is None
        verdict = combine_votes([good, bad], "mean", 0.5)
        assert verdict is not None and verdict.status == "error" and verdict.score is None
        skipped = combine_votes([VerdictRef("skipped", None, None)], "mean", 0.5)
        assert skipped is not None and skipped.status == "skipped"


def krippendorff(units: list[list[float]]) -> float | None:
    """Return alpha for interval data by its definition: coincidences of all pairs of values."""
    units = [unit for unit in units if len(unit) > 1]
    values = [value for unit in units for value in unit]
    observed = sum((x - y) ** 2 / (len(unit) - 1) for unit in units for x, y in itertools.permutations(unit, 2)) / len(
        values
    )
    expected = sum((x - y) ** 2 for x, y in itertools.permutations(values, 2)) / (len(values) * (len(values) - 1))
    return None if expected == 0 else 1 - observed / expected


class TestAgreement:
    def of(self, units: list[list[float]]) -> Any:
        tally = AgreementTally()
        for unit in units:
            tally.add([Judged("passed" if score >= 0.5 else "failed", score) for score in unit])
        return tally.summary()

    @given(st.lists(st.lists(st.floats(0, 1).map(lambda x: round(x, 3)), min_size=1, max_size=4), max_size=12))
    def test_alpha_is_krippendorffs(self, units: list[list[float]]) -> None:
        summary = self.of(units)
        if summary is None:
            assert all(len(unit) < 2 for unit in units)
            return
        expected = krippendorff(units)
        assert (summary.alpha is None) == (expected is None)
        assert expected is None or summary.alpha == pytest.approx(expected, abs=1e-6)

    def test_known_values(self) -> None:
        # Krippendorff, Computing Krippendorff's Alpha-Reliability (2011): interval data of four observers.
        nan = None
        observers = [
            [1, 2, 3, 3, 2, 1, 4, 1, 2, nan, nan, nan],
            [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, nan, 3],
            [nan, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, nan],
            [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, nan],
        ]
        units = [[float(value) for value in unit if value is not None] for unit in zip(*observers, strict=True)]
        assert self.of(units).alpha == pytest.approx(0.849, abs=5e-4)

    def test_equal_verdicts_are_counted_by_pass_and_fail(self) -> None:
        summary = self.of([[0.9, 0.6], [0.9, 0.1], [0.2]])
        assert (summary.equal, summary.outputs) == (0.5, 2)
        assert self.of([[1.0, 1.0]]).alpha is None
