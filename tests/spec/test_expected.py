"""Several right answers: a list means any of its elements, and is never compared as its Python repr."""

import json
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import AttemptError, ConfigError
from holdfast.report.run_view import RunView
from holdfast.store.rundir import RunDir
from tests.support.running import lines
from tests.support.specs import grade, load

CITIES = ["Paris", "City of Paris"]


def score(folder: Path, block: Any, answer: Any, **row: Any) -> Any:
    verdict = grade(folder, block, answer, **row)
    assert not isinstance(verdict, AttemptError), verdict
    return verdict.score


class TestLists:
    @pytest.mark.parametrize("answer", CITIES)
    @pytest.mark.parametrize("written", ["{{ expected }}", "{{ row.names }}", "{{ names|list }}", CITIES, None])
    def test_any_element_is_right(self, tmp_path: Path, answer: Any, written: Any) -> None:
        row = {"expected": CITIES, "names": CITIES, "row": {"names": CITIES}}
        block = {"type": "exact"} | ({} if written is None else {"expected": written})
        assert score(tmp_path, block, answer, **row) == 1

    def test_the_text_of_the_list_itself_is_wrong(self, tmp_path: Path) -> None:
        for block in ({"type": "exact"}, {"type": "text", "contains_any": "{{ expected }}"}):
            assert score(tmp_path, block, "['Paris; 'City of Paris']".replace("Paris", "Rome"), expected=CITIES) == 0
        assert score(tmp_path, {"type": "exact"}, str(CITIES), expected=CITIES) == 0

    @pytest.mark.parametrize(
        ("block", "answer", "expected", "points"),
        [
            ({"type": "number"}, "so 7", [5, "7"], 1),
            ({"type": "number"}, "so 6", [5, "7"], 0),
            ({"type": "number", "tolerance": 0.5}, "6.6", [5, 7], 1),
            ({"type": "choice"}, "C", ["A", "C"], 1),
            ({"type": "choice"}, "C", [0, 2], 1),
            ({"type": "choice"}, "B", ["A", "C"], 0),
            ({"type": "math"}, "1/2", ["x^2", "0.5"], 1),
            ({"type": "math"}, "1/3", ["x^2", "0.5"], 0),
            ({"type": "text", "contains": "{{ expected }}"}, "a and b", ["a", "b"], 1),
            ({"type": "text", "contains": "{{ expected }}"}, "only a", ["a", "b"], 0.5),
            ({"type": "text", "contains_any": "{{ expected }}"}, "only b", ["a", "b"], 1),
            ({"type": "text", "not_contains": "{{ expected }}"}, "only b", ["x", "b"], 0.5),
            ({"type": "exact"}, "true", True, 1),
            ({"type": "exact"}, "False", False, 1),
            ({"type": "exact"}, "a", ["a"], 1),
        ],
    )
    def test_every_grader_that_compares_takes_a_list(
        self, tmp_path: Path, block: Any, answer: str, expected: Any, points: float | int
    ) -> None:
        assert score(tmp_path, block, answer, expected=expected) == points

    def test_the_most_similar_element_counts(self, tmp_path: Path) -> None:
        assert score(tmp_path, {"type": "similarity"}, "Paris", expected=CITIES) == 1

    def test_a_list_may_be_written_in_the_file_with_templates_in_it(self, tmp_path: Path) -> None:
        block = {"type": "exact", "expected": ["{{ a }}", "{{ more }}", 3]}
        for answer in ("one", "two", "three", "3"):
            assert score(tmp_path, block, answer, a="one", more=["two", "three"]) == 1
        assert score(tmp_path, block, "four", a="one", more=["two", "three"]) == 0

    @pytest.mark.parametrize("kind", ["exact", "number", "choice", "similarity", "math"])
    @pytest.mark.parametrize(
        ("expected", "words"),
        [([], "an empty list"), ({"a": 1}, "an object"), (None, "null"), ([["a"]], "a list"), ([None], "null")],
    )
    def test_values_that_cannot_be_compared_are_errors_and_not_scores(
        self, tmp_path: Path, kind: str, expected: Any, words: str
    ) -> None:
        error = grade(tmp_path, {"type": kind}, "Paris", expected=expected)
        assert isinstance(error, AttemptError) and words in error.message and not error.retry

    def test_a_list_inside_a_longer_text_is_an_error(self, tmp_path: Path) -> None:
        error = grade(tmp_path, {"type": "exact", "expected": "It is {{ expected }}."}, "x", expected=CITIES)
        assert isinstance(error, AttemptError) and "cannot insert a list into text" in error.message

    @pytest.mark.parametrize(
        ("block", "words"),
        [
            ({"type": "exact", "expected": []}, "is an empty list: no answer could be right"),
            ({"type": "exact", "expected": None}, "must not be null; omit it"),
            ({"type": "exact", "expected": {"a": 1}}, "not a mapping"),
            ({"type": "number", "expected": "1,2 or 3"}, "'1,2 or 3' is not one number; write several as a list"),
            ({"type": "number", "expected": [1, "2 or 3"]}, "'2 or 3' is not one number"),
        ],
    )
    def test_mistakes_in_the_file_are_rejected_when_it_is_read(self, tmp_path: Path, block: Any, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            load(tmp_path, graders=[block])

    def test_several_numbers_in_a_text_are_an_error(self, tmp_path: Path) -> None:
        error = grade(tmp_path, {"type": "number"}, "1", expected="1,2 or 3")
        assert isinstance(error, AttemptError) and "'1,2 or 3' contains several numbers" in error.message


@pytest.mark.parametrize(
    "block", [{"type": "exact"}, {"type": "text", "contains_cs": "{{ expected }}"}, {"type": "cer"}]
)
@pytest.mark.parametrize(("answer", "expected"), [("Cafe\u0301", "Caf\u00e9"), ("Caf\u00e9", "Cafe\u0301")])
def test_texts_are_compared_in_one_unicode_form(tmp_path: Path, block: Any, answer: str, expected: str) -> None:
    assert score(tmp_path, block, answer, expected=expected) == 1


class TestFeedback:
    @pytest.mark.parametrize(
        ("block", "words"),
        [
            ({"type": "text", "contains": "{{ expected }}"}, "lacks 'Paris'; lacks 'City of Paris'"),
            ({"type": "text", "contains_any": ["{{ expected }}"]}, "contains none of 'Paris', 'City of Paris'"),
            ({"type": "text", "not_contains": "{{ bad }}"}, "contains 'Rome'"),
            ({"type": "exact"}, "expected one of 'Paris', 'City of Paris'"),
        ],
    )
    def test_feedback_shows_the_expected_text_and_not_the_template(
        self, tmp_path: Path, block: Any, words: str
    ) -> None:
        assert words in grade(tmp_path, block, "Rome", expected=CITIES, bad="Rome").feedback


def test_a_list_in_a_dataset_file_is_graded_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.support.specs import command, write_rows, write_spec

    write_rows(tmp_path / "rows.jsonl", [{"q": "Paris", "references": CITIES}, {"q": "Rome", "references": CITIES}])
    write_spec(
        tmp_path,
        samples=None,
        dataset={"path": "rows.jsonl"},
        prompt="{{ q }}",
        target={"command": ["echo", "{{ prompt }}"]},
        graders=[{"type": "exact", "expected": "{{ references }}"}],
    )
    ended = command(monkeypatch, capsys, tmp_path, "eval", "eval.yaml")
    (metrics,) = tmp_path.glob("runs/*/*/metrics.json")
    assert ended.code == 0 and json.loads(metrics.read_text())["score"] == 0.5


def test_references_for_flexeval_are_always_texts(tmp_path: Path) -> None:
    from holdfast.plugins.flexeval import write_flexeval

    rows = [
        {"id": "1", "references": ["a", "b"], "expected": "x"},
        {"id": "2", "expected": [5, True]},
        {"id": "3", "expected": True},
        {"id": "4", "expected": {"a": 1}},
    ]
    target = {"command": ["echo", "said"]}
    run = holdfast.evaluate(
        name="e", samples=rows, prompt="{{ id }}", target=target, graders=[], runs_dir=tmp_path / "r"
    )
    written = write_flexeval(RunView(RunDir(run.path)), tmp_path / "flexeval")[0]
    references = [json.loads(line)["references"] for line in written.read_text().splitlines()]
    assert references == [["a", "b"], ["5", "true"], ["true"], ['{"a":1}']]


def test_the_recipe_for_a_half_finished_outputs_file_asks_only_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.support.running import ROOT
    from tests.support.specs import command
    from tests.test_docs import MARKED

    page = (ROOT / "docs" / "flexeval.md").read_text()
    for block in MARKED.finditer(page):
        if block["file"]:
            (tmp_path / block["file"]).write_text(block["body"])
    counting = (tmp_path / "continued.py").read_text().replace('return "four"', 'print(prompt)\n    return "four"')
    (tmp_path / "continued.py").write_text(counting)
    ended = command(monkeypatch, capsys, tmp_path, "eval", "continued.yaml")
    (metrics,) = tmp_path.glob("runs/*/*/metrics.json")
    assert ended.code == 0 and json.loads(metrics.read_text())["score"] == 1
    assert ended.out.count("What is") == 1 and "What is 2 + 2?" in ended.out
    assert [entry["output"] for entry in lines(metrics.with_name("outputs.jsonl"))] == ["two", "four"]
