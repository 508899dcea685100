"""A stored survey is the survey that reading the dataset gives, or it is ignored."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.data.dataset import Dataset
from holdfast.errors import UsageError
from holdfast.plan import identity
from holdfast.plan.identity import identify
from holdfast.spec.load import load_eval

if TYPE_CHECKING:
    from holdfast.data.dataset import Survey

ROWS = [{"id": f"s{number}", "q": f"{number} + 1", "level": "ab"[number % 2], "expected": "1"} for number in range(6)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and every survey is stored."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(identity, "_LARGE", 1)
    return tmp_path / "home"


def write(folder: Path, rows: list[dict[str, Any]] = ROWS, **keys: Any) -> Path:
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {
        "name": "stored",
        "dataset": {"path": "data.jsonl"},
        "target": {"model": "m", "base_url": "http://127.0.0.1:9/v1"},
        "prompt": "{{ q }}",
        "graders": [
            {"type": "exact", "name": "always"},
            {"type": "exact", "name": "some", "expected": "{{ q }}", "where": "level == 'a'"},
        ],
        "by": ["level"],
        **keys,
    }
    (folder / "eval.yaml").write_text(json.dumps(spec))
    return folder / "eval.yaml"


def stored(home: Path) -> list[Path]:
    return sorted((home / "surveys").iterdir()) if (home / "surveys").exists() else []


def content(survey: Survey) -> dict[str, Any]:
    return {
        "count": survey.count,
        "digest": survey.digest,
        "digests": survey.digests,
        "panels": [survey.panels.panel_at(position) for position in range(survey.count)],
        "rows": survey.panels.rows(),
        "ids": [survey.ids[position] for position in range(survey.count)],
        "panel kinds": survey.panels.fingerprint(),
        "shapes": list(survey.shapes.items()),
        "asked": survey.asked,
        "groupings": {
            field: (grouping.values, [grouping.number_at(position) for position in range(survey.count)])
            for field, grouping in survey.groupings.items()
        },
    }


def surveyed(eval_file: Path) -> dict[str, Any]:
    return content(identify(load_eval(eval_file)).survey)


def fresh(eval_file: Path) -> dict[str, Any]:
    spec = load_eval(eval_file)
    return content(Dataset(spec).survey())


@pytest.mark.parametrize(
    "target",
    [None, {"http": "http://127.0.0.1:9", "request": {"q": "{{ q }}", "ids": "{{ [id] }}"}, "response": "$.a"}],
)
def test_a_stored_survey_is_equal_and_is_used(tmp_path: Path, home: Path, target: Any) -> None:
    eval_file = write(tmp_path, **({} if target is None else {"target": target}))
    first = surveyed(eval_file)
    assert first == fresh(eval_file)
    (path,) = stored(home)
    written = path.stat().st_ino
    assert surveyed(eval_file) == first and path.stat().st_ino == written


def test_a_row_that_changes_is_noticed_whatever_the_times_of_the_file_say(tmp_path: Path, home: Path) -> None:
    eval_file = write(tmp_path)
    first, data = surveyed(eval_file), tmp_path / "data.jsonl"
    before = data.stat()
    with data.open("r+b") as file:
        file.seek(data.read_bytes().index(b"3 + 1"))
        file.write(b"7")
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert surveyed(eval_file) == fresh(eval_file) != first
    assert len(stored(home)) == 1, "the stored survey was replaced"


@pytest.mark.parametrize(
    "keys",
    [
        {"prompt": "Say {{ q }}"},
        {"by": []},
        {"cluster": "level"},
        {"dataset": {"path": "data.jsonl", "limit": 3}},
        {"dataset": {"path": "data.jsonl", "where": "level == 'b'"}},
        {"dataset": {"path": "data.jsonl", "shuffle": 4}},
        {"dataset": {"path": "data.jsonl", "id": "q"}},
        {"follow_ups": ["And {{ level }}?"]},
    ],
)
def test_what_an_eval_says_of_rows_makes_another_survey(tmp_path: Path, home: Path, keys: dict[str, Any]) -> None:
    surveyed(write(tmp_path))
    eval_file = write(tmp_path, **keys)
    assert surveyed(eval_file) == fresh(eval_file)
    assert len(stored(home)) == 2


def test_a_stored_survey_with_any_byte_changed_is_ignored(tmp_path: Path, home: Path) -> None:
    eval_file = write(tmp_path)
    expected = surveyed(eval_file)
    (path,) = stored(home)
    whole = path.read_bytes()
    for place in range(0, len(whole), 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        assert surveyed(eval_file) == expected
        assert path.read_bytes() == whole, "it was stored again"
        path.write_bytes(whole[:place])
        assert surveyed(eval_file) == expected


def test_nothing_is_stored_for_rows_that_name_files(tmp_path: Path, home: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    rows = [{"id": "a", "q": "x", "level": "a", "picture": "a.png", "expected": "1"}]
    parts = [{"text": "{{ q }}"}, {"image": "{{ picture }}"}]
    eval_file = write(tmp_path, rows, prompt=None, messages=[{"role": "user", "content": parts}])
    first = surveyed(eval_file)
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nother")
    assert surveyed(eval_file) != first
    assert not stored(home)


def test_the_surveys_that_were_used_last_are_kept(tmp_path: Path, home: Path) -> None:
    for number in range(10):
        surveyed(write(tmp_path, prompt=f"{number} {{{{ q }}}}"))
    assert len(stored(home)) == 8


def test_a_home_that_cannot_be_written_is_no_failure(tmp_path: Path, home: Path) -> None:
    home.write_text("a file in the way")
    eval_file = write(tmp_path)
    assert surveyed(eval_file) == fresh(eval_file)


def test_small_datasets_are_surveyed_each_time(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    surveyed(write(tmp_path))
    assert not stored(home)


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Places of the rows of which samples were made."""
    places: list[str] = []
    make = Dataset.sample

    def sample(self: Dataset, pair: tuple[str, Any]) -> Any:
        places.append(pair[0].rpartition(":")[2])
        return make(self, pair)

    monkeypatch.setattr(Dataset, "sample", sample)
    return places


ALWAYS = {"type": "exact", "name": "always"}
SOME = {"type": "exact", "name": "some", "expected": "{{ q }}", "where": "level == 'a'"}


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Dataset]:
    """The datasets whose rows were decoded."""
    datasets: list[Dataset] = []
    rows = Dataset.rows

    def decode(self: Dataset) -> Any:
        datasets.append(self)
        return rows(self)

    monkeypatch.setattr(Dataset, "rows", decode)
    return datasets


@pytest.mark.parametrize(
    ("graders", "is_decoded"),
    [
        ([ALWAYS, SOME, {"type": "text", "contains": "please"}], False),
        ([{"type": "exact", "name": "truth", "expected": True}, ALWAYS], False),
        ([{"type": "text", "contains": "1", "where": "level == 'a'"}, ALWAYS], False),
        ([SOME], False),
        ([{**ALWAYS, "threshold": 0.5, "name": "other"}], False),
        ([SOME, {"type": "exact", "name": "again", "expected": "{{ q }}"}], False),
        ([ALWAYS, {"type": "exact", "expected": "1", "where": "level == 'b'"}], True),
        ([ALWAYS, {"type": "number", "expected": "{{ q }}"}], False),
    ],
)
def test_other_graders_change_which_apply_to_a_row_and_nothing_else(
    tmp_path: Path, sampled: list[str], decoded: list[Dataset], graders: list[dict[str, Any]], is_decoded: bool
) -> None:
    rows: list[dict[str, Any]] = [*ROWS, {"id": "l", "q": ["1", "2"], "level": "a", "expected": ["1"]}]
    surveyed(write(tmp_path, rows, prompt="{{ id }}"))
    eval_file = write(tmp_path, rows, prompt="{{ id }}", graders=graders)
    sampled.clear()
    decoded.clear()
    survey = surveyed(eval_file)
    assert (not sampled, bool(decoded)) == (True, is_decoded)
    assert survey == fresh(eval_file)
    decoded.clear()
    assert surveyed(eval_file) == survey
    assert not decoded, "what was read of rows is stored"


def test_rows_and_graders_may_change_at_once(tmp_path: Path, sampled: list[str]) -> None:
    surveyed(write(tmp_path))
    rows = [*ROWS[:2], {**ROWS[2], "q": "0"}, *ROWS[3:]]
    eval_file = write(tmp_path, rows, graders=[SOME, {"type": "text", "contains": "please"}, ALWAYS])
    sampled.clear()
    survey = surveyed(eval_file)
    assert sampled == ["3"]
    assert survey == fresh(eval_file)


def test_rows_for_which_a_condition_fails_are_known_to_a_second_grader_with_it(tmp_path: Path) -> None:
    fails = {"type": "text", "contains": "1", "where": "level > 2"}
    surveyed(write(tmp_path, graders=[ALWAYS, {**fails, "name": "first"}]))
    eval_file = write(tmp_path, graders=[{**fails, "name": "first"}, {**fails, "name": "second"}])
    survey = surveyed(eval_file)
    assert survey == fresh(eval_file)
    assert all(panel.unsure == {0, 1} for panel in survey["panels"])


@pytest.mark.parametrize("more", [{"expected": "{{ nothing }}"}, {"where": "nothing > 3"}])
def test_a_new_grader_that_lacks_a_field_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    surveyed(write(tmp_path))
    eval_file = write(tmp_path, graders=[ALWAYS, {"type": "exact", "name": "new", **more}])
    with pytest.raises(UsageError, match="no sample has a field 'nothing'"):
        surveyed(eval_file)


@pytest.mark.parametrize(
    ("edit", "read"),
    [
        (lambda lines: [*lines, '{"id": "n", "q": "2", "level": "c", "expected": "1"}\n'], ["7"]),
        (lambda lines: [lines[0], "\n", lines[1].replace("1 +", "9 +"), *lines[2:]], ["3"]),
        (lambda lines: lines[2:], []),
        (lambda lines: lines[::-1], []),
        (lambda lines: ['{"id": "n", "q": "2", "level": "c", "expected": "1"}\n', *lines[3:], *lines[:2]], ["1"]),
        (lambda lines: [*lines[:-1], lines[-1].rstrip()], ["6"]),
    ],
)
def test_only_lines_that_are_new_or_changed_are_surveyed(
    tmp_path: Path, sampled: list[str], edit: Any, read: list[str]
) -> None:
    eval_file, data = write(tmp_path), tmp_path / "data.jsonl"
    surveyed(eval_file)
    data.write_text("".join(edit(data.read_text().splitlines(keepends=True))))
    sampled.clear()
    survey = surveyed(eval_file)
    assert sampled == read
    assert survey == fresh(eval_file)
    sampled.clear()
    assert surveyed(eval_file) == survey and not sampled, "the survey of the changed file was stored"


def test_a_file_with_a_byte_order_mark_is_surveyed_as_a_whole(tmp_path: Path, sampled: list[str]) -> None:
    eval_file, data = write(tmp_path), tmp_path / "data.jsonl"
    surveyed(eval_file)
    data.write_bytes(b"\xef\xbb\xbf" + data.read_bytes())
    sampled.clear()
    assert surveyed(eval_file) == fresh(eval_file)
    assert sampled


fields = st.fixed_dictionaries(
    {"q": st.sampled_from(["1", "2", "3"])},
    optional={
        "id": st.integers(4, 400).map(lambda number: f"s{number}"),
        "level": st.sampled_from(["a", "b", "c", None, 3]),
        "expected": st.sampled_from(["1", ["1", "2"]]),
        "more": st.just(True),
    },
)
written_lines = st.one_of(fields.map(json.dumps), fields.map(json.dumps), st.sampled_from(["", " ", "{}", "[]", "{"]))
edits = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.lists(written_lines, max_size=3)), max_size=3)


def survey_or_error(make: Any, eval_file: Path) -> Any:
    try:
        return make(eval_file)
    except UsageError as error:
        return str(error)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(written_lines, max_size=15), st.lists(st.tuples(st.integers(0, 1), edits), min_size=1, max_size=3))
def test_any_edit_gives_the_survey_of_reading_everything(home: Path, lines: list[str], changes: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graders = [
            {"type": "exact", "name": "always", "expected": "{{ expected | default('') }}"},
            {"type": "exact", "name": "some", "expected": "1", "where": "level is defined and level == 'a'"},
        ]
        eval_file = write(folder, dataset={"path": ["data.jsonl", "more.jsonl"]}, graders=graders)
        files = [[json.dumps(row) for row in ROWS], lines]
        for number, edited in [(0, []), *changes]:
            for start, count, inserted in edited:
                files[number][start : start + count] = inserted
            for path, content_lines in zip(("data.jsonl", "more.jsonl"), files, strict=True):
                (folder / path).write_text("\n".join(content_lines))
            assert survey_or_error(surveyed, eval_file) == survey_or_error(fresh, eval_file)


grader_blocks = st.builds(
    lambda where, expected: {"type": "exact", "expected": expected, **({} if where is None else {"where": where})},
    st.sampled_from([None, None, "level == 'a'", "level == 'b'", "level > 2", "more is defined", "id == q"]),
    st.sampled_from(["1", True, "{{ q }}", "{{ expected }}", "{{ level | default(0) }}"]),
)
grader_lists = st.lists(grader_blocks, min_size=1, max_size=3)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(fields, max_size=8), st.lists(grader_lists, min_size=2, max_size=4))
def test_any_change_of_graders_gives_the_survey_of_reading_everything(home: Path, rows: Any, changes: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        for blocks in changes:
            graders = [{**block, "name": f"g{number}"} for number, block in enumerate(blocks)]
            eval_file = write(Path(name), [*ROWS[:3], *rows], graders=graders)
            assert survey_or_error(surveyed, eval_file) == survey_or_error(fresh, eval_file)
