"""Runs sample by sample: flips, disagreement, absent samples; and two conversations aligned."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.report.alignment import MOST_TEXT, align, compare_texts
from holdfast.report.compare import compare_scores, read_scores
from holdfast.report.pairs import RunComparison, compare_runs, take_rows
from holdfast.report.run_view import RunView
from holdfast.report.suite import suite_grid
from holdfast.report.timeline import Timeline, trial_timeline
from holdfast.store.rundir import RunDir
from tests.support.patterns import CORRECT, POINTS, finished_run
from tests.support.showcase import agent_run

if TYPE_CHECKING:
    from pathlib import Path

FIRST = {"a": "yes", "b": "yes", "c": "no", "d": "no", "e": "yes"}
SECOND = {"a": "yes", "b": "no", "c": "yes", "d": "no", "f": "yes"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[RunView]:
    """Two runs with one sample of each kind, and one that only they have."""
    return [RunView(RunDir(finished_run(folder / name, answers))) for name, answers in (("1", FIRST), ("2", SECOND))]


def compared(views: list[RunView], **keys: Any) -> RunComparison:
    return compare_runs([read_scores(view) for view in views], **keys)


class TestRuns:
    def test_every_sample_passes_in_one_in_both_or_in_neither(self, two: list[RunView]) -> None:
        page = compared(two, show="all")
        assert {row.sample: row.kind for row in page.rows} == {"a": "both", "b": "gained", "c": "lost", "d": "neither"}
        assert page.counts == {"gained": 1, "lost": 1, "both": 1, "neither": 1}
        assert [row.spread for row in page.rows] == [1, 1, 0, 0], "disagreement comes first"

    @pytest.mark.parametrize(
        ("show", "samples"),
        [(None, "bc"), ("flips", "bc"), ("gained", "b"), ("lost", "c"), ("both", "a"), ("all", "bcad")],
    )
    def test_rows_are_chosen_and_flips_are_shown_first(
        self, two: list[RunView], show: str | None, samples: str
    ) -> None:
        page = compared(two, show=show)
        assert "".join(row.sample for row in page.rows) == samples and page.total == len(samples)

    def test_flips_and_numbers_are_those_of_compare(self, two: list[RunView]) -> None:
        first, second = map(read_scores, two)
        comparison, page = compare_scores(first, second), compare_runs([first, second])
        assert {flip.sample: flip.gained for flip in comparison.flips} == {
            row.sample: row.kind == "gained" for row in page.rows
        }
        (pair,), (row,) = page.pairs, comparison.metrics
        assert (pair.metrics[0].difference, pair.metrics[0].adjusted) == (row.difference, row.adjusted)
        assert pair.metrics[0].detectable == row.detectable

    def test_samples_of_one_run_only_are_listed(self, two: list[RunView]) -> None:
        first, second = (view.manifest.id for view in two)
        absent = compared(two).absent
        assert [(each.run, each.lacks, each.samples) for each in absent] == [
            (first, False, ["e"]),
            (second, False, ["f"]),
        ]

    def test_a_page_of_rows_has_answers_and_feedback(self, two: list[RunView]) -> None:
        page = take_rows(compared(two, show="all"), [partial(view.trial, number=1) for view in two], 0, 1)
        assert (page.start, page.total, len(page.rows)) == (0, 4, 1)
        left, right = page.rows[0].cells
        assert left is not None and right is not None
        assert (left.answer, left.feedback) == ("yes", "")
        assert (right.answer, right.feedback) == ("no", "correct: expected 'yes'")
        unread = take_rows(compared(two, show="all"), [lambda _: None] * 2, 3, 5)
        assert [[cell and cell.answer for cell in row.cells] for row in unread.rows] == [["", ""]]

    def test_three_runs_have_a_grid_and_runs_that_lack_a_sample(self, two: list[RunView], folder: Path) -> None:
        third = RunView(RunDir(finished_run(folder / "3", {**FIRST, "a": "no"})))
        page = compared([*two, third])
        assert page.counts == {} and page.show == "all" and len(page.pairs) == 2 and page.points == []
        rows = {row.sample: [cell and cell.score for cell in row.cells] for row in page.rows}
        assert rows == {"a": [1, 1, 0], "b": [1, 0, 1], "c": [0, 1, 0], "d": [0, 0, 0], "e": [1, None, 1]}
        assert [(each.run, each.lacks, each.samples) for each in page.absent] == [
            (two[0].manifest.id, True, ["f"]),
            (two[1].manifest.id, True, ["e"]),
            (third.manifest.id, True, ["f"]),
        ]

    def test_scores_that_are_not_pass_or_fail_have_points(self, folder: Path) -> None:
        views = [
            RunView(RunDir(finished_run(folder / name, answers, graders=[*POINTS, *CORRECT])))
            for name, answers in (
                ("4", {"a": "0.25", "b": "1", "c": "0.5"}),
                ("5", {"a": "0.75", "b": "1", "c": "0.5"}),
            )
        ]
        page = compared(views, metric="points")
        points = {(point.first, point.second): point.samples for point in page.points}
        assert points == {(0.25, 0.75): 1, (1.0, 1.0): 1, (0.5, 0.5): 1}
        assert page.metrics == ["points", "correct", "passed"]
        assert compared(views, metric="correct").points == []
        with pytest.raises(UsageError, match="no metric 'grace'"):
            compared(views, metric="grace")

    def test_a_moved_threshold_leaves_no_flips(self, folder: Path) -> None:
        views = [
            RunView(
                RunDir(
                    finished_run(folder / name, {"a": "0.25", "b": "0.75"}, graders=[{**POINTS[0], "threshold": limit}])
                )
            )
            for name, limit in (("6", 0.2), ("7", 0.5))
        ]
        page = compared(views)
        assert page.counts == {} and {row.kind for row in page.rows} == {None} and page.total == 2

    def test_runs_without_a_common_sample_say_so_and_have_no_rows(self, two: list[RunView], folder: Path) -> None:
        page = compared([two[0], RunView(RunDir(finished_run(folder / "8", {"x": "yes"})))])
        assert "no sample in common" in page.pairs[0].problem
        assert (page.metric, page.metrics, page.counts, page.rows) == ("", [], {}, [])


def test_of_several_runs_of_an_eval_and_a_target_the_grid_has_the_newest(folder: Path) -> None:
    old, new = (RunDir(finished_run(folder / name, {"a": name, "b": "yes"})) for name in ("yes", "no"))
    grid = suite_grid([old, new])
    assert (grid.targets, grid.hidden) == (["agent.py:reply"], [old.path.name[-8:]])
    (row,) = grid.rows
    assert row.eval == "e" and [cell and cell.run.score for cell in row.cells] == [0.5]


class TestTexts:
    @given(st.text(max_size=60), st.text(max_size=60))
    def test_pieces_make_up_the_texts_and_share_the_same_parts(self, first: str, second: str) -> None:
        sides = compare_texts(first, second)
        assert ["".join(piece.text for piece in side) for side in sides] == [first, second]
        shared = ["".join(piece.text for piece in side if piece.shared) for side in sides]
        assert shared[0] == shared[1]

    def test_words_that_differ_are_marked(self) -> None:
        left, right = compare_texts("it costs 3 euros", "it costs 30 euros, I think")
        assert [(piece.text, piece.shared) for piece in left] == [("it costs", True), (" 3", False), (" euros", True)]
        assert [piece.text for piece in right if not piece.shared] == [" 30", ", I think"]

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("a " * 9_000, "b " * 9_000),
            ("a\n" * 9_000, "b\na\n" * 4_000),
            ("x" * MOST_TEXT * 2, "y"),
            ("same " * 2_900, "same " * 2_900 + "end"),
        ],
    )
    def test_long_and_monotonous_texts_are_compared_too(self, first: str, second: str) -> None:
        assert ["".join(piece.text for piece in side) for side in compare_texts(first, second)] == [first, second]


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunView, RunView]:
    """Two agents of a shop, of which the second knows another price."""
    folder = tmp_path_factory.mktemp("talks")
    first = agent_run(folder / "1")
    second = agent_run(folder / "2", agent=('"milk": 1', '"milk": 3, "salt": 2'))
    return RunView(RunDir(first)), RunView(RunDir(second))


def timeline(view: RunView, sample: str) -> Timeline:
    trial = view.trial(sample, 1)
    assert trial is not None
    return trial_timeline(view, trial)


class TestTalks:
    def test_messages_and_calls_stand_opposite_each_other(self, talks: tuple[RunView, RunView]) -> None:
        talk = align(*(timeline(view, "milk") for view in talks))
        assert [turn.number for turn in talk.turns] == [0, 1, 2, 3]
        rows = [
            (row.first and row.first.label, row.second and row.second.label, row.same) for row in talk.turns[1].rows
        ]
        assert rows == [("user", "user", True), ("price", "price", False), ("assistant", "assistant", False)]
        call = talk.turns[1].rows[1]
        assert call.first is not None and call.first.result is not None and call.second is not None
        assert [piece.text for piece in call.first.pieces] == ['{"thing": "milk"}']
        assert [piece.text.strip() for piece in call.first.result if not piece.shared] == ["1"]

    def test_the_first_difference_and_opposite_checkpoints_are_found(self, talks: tuple[RunView, RunView]) -> None:
        talk = align(*(timeline(view, "milk") for view in talks))
        assert talk.differs_at == (1, 1)
        assert [band and band.state for band in talk.turns[2].checkpoints] == ["failed", "passed"]
        assert [[verdict and verdict.status for verdict in row.verdicts] for row in talk.graders] == [
            ["passed", "passed"]
        ]

    def test_a_turn_that_only_one_conversation_reached_stands_alone(self, talks: tuple[RunView, RunView]) -> None:
        talk = align(*(timeline(view, "salt") for view in talks))
        assert [turn.note for turn in talk.turns] == [
            "",
            "",
            "was asked only in the second",
            "was asked only in the second",
        ]
        asked = talk.turns[2].rows
        assert asked[0].same and all(row.first is None and row.second is not None for row in asked[1:])

    def test_a_conversation_is_the_same_as_itself(self, talks: tuple[RunView, RunView]) -> None:
        both = timeline(talks[0], "tea")
        talk = align(both, both)
        assert talk.differs_at is None and all(row.same for turn in talk.turns for row in turn.rows)
