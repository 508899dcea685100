"""A cached survey equals the survey that reading the dataset gives, whatever happened to files, eval and cache."""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from array import array
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.data import survey as survey_module
from holdfast.data.dataset import Dataset
from holdfast.data.survey import Ids, _CachedSurvey, make_survey
from holdfast.errors import UsageError
from holdfast.plan.identity import identify
from holdfast.spec.load import load_eval
from holdfast.store.home import HomeDb

if TYPE_CHECKING:
    from holdfast.data.survey import Survey

ROWS = [{"id": f"s{number}", "q": f"{number} + 1", "level": "ab"[number % 2], "expected": "1"} for number in range(6)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home. Every survey is cached, in parts of about two lines."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(survey_module, "LARGE", 1)
    monkeypatch.setattr(survey_module, "_PART_BITS", 7)
    monkeypatch.setattr(survey_module, "_PART_ROWS", 2)
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


def cached(home: Path) -> int:
    """Return the number of cached surveys."""
    with closing(sqlite3.connect(home / "home.db")) as connection:
        return len(connection.execute("SELECT * FROM shelves").fetchall())


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
    return content(make_survey(Dataset(spec)))


@pytest.mark.parametrize(
    "target",
    [None, {"http": "http://127.0.0.1:9", "request": {"q": "{{ q }}", "ids": "{{ [id] }}"}, "response": "$.a"}],
)
@pytest.mark.parametrize("dataset", [{}, {"limit": 5}, {"where": "level == 'b'"}, {"shuffle": 4}, {"id": "q"}], ids=str)
def test_a_cached_survey_is_equal_and_is_used(
    tmp_path: Path, home: Path, sampled: list[str], decoded: list[Any], dataset: Any, target: Any
) -> None:
    keys = {} if target is None else {"target": target}
    eval_file = write(tmp_path, dataset={"path": "data.jsonl", **dataset}, **keys)
    first = surveyed(eval_file)
    assert first == fresh(eval_file)
    sampled.clear()
    decoded.clear()
    assert surveyed(eval_file) == first
    assert not sampled and not decoded and cached(home) == 1


def test_a_row_that_changes_is_noticed_whatever_the_times_of_the_file_say(tmp_path: Path, home: Path) -> None:
    eval_file = write(tmp_path)
    first, data = surveyed(eval_file), tmp_path / "data.jsonl"
    before = data.stat()
    with data.open("r+b") as file:
        file.seek(data.read_bytes().index(b"3 + 1"))
        file.write(b"7")
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert surveyed(eval_file) == fresh(eval_file) != first
    assert cached(home) == 1, "the cached survey was replaced"


@pytest.mark.parametrize(
    "keys",
    [
        {"prompt": "Say {{ q }}"},
        {"by": []},
        {"cluster": "level"},
        {"dataset": {"path": "data.jsonl", "limit": 3}},
        {"follow_ups": ["And {{ level }}?"]},
    ],
)
def test_what_an_eval_says_of_rows_makes_another_survey(tmp_path: Path, home: Path, keys: dict[str, Any]) -> None:
    surveyed(write(tmp_path))
    eval_file = write(tmp_path, **keys)
    assert surveyed(eval_file) == fresh(eval_file)
    assert cached(home) == 2


def test_nothing_is_cached_for_rows_that_name_files(tmp_path: Path, home: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    rows = [{"id": "a", "q": "x", "level": "a", "picture": "a.png", "expected": "1"}]
    parts = [{"text": "{{ q }}"}, {"image": "{{ picture }}"}]
    eval_file = write(tmp_path, rows, prompt=None, messages=[{"role": "user", "content": parts}])
    first = surveyed(eval_file)
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nother")
    assert surveyed(eval_file) != first
    assert not home.exists()


def test_eight_surveys_are_kept(tmp_path: Path, home: Path) -> None:
    for number in range(10):
        surveyed(write(tmp_path, prompt=f"{number} {{{{ q }}}}"))
    assert cached(home) == 8


def test_a_home_that_cannot_be_written_is_no_failure(tmp_path: Path, home: Path) -> None:
    home.write_text("a file in the way")
    eval_file = write(tmp_path)
    assert surveyed(eval_file) == fresh(eval_file)
    assert home.read_text() == "a file in the way"


def test_small_datasets_are_surveyed_each_time(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    surveyed(write(tmp_path))
    assert not home.exists()


def test_ids_may_be_longer_than_four_bytes_can_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "_LONGEST_IDS", 7)
    names = ["abc", "", "déf", "g\ud800"]
    encoded = [name.encode("utf-8", "surrogatepass") for name in names]
    ids = Ids()
    ids.extend(b"".join(encoded), array("I", map(len, encoded)).tobytes())
    assert [ids[number] for number in range(4)] == names and not ids.may_repeat
    ids.extend(encoded[2], array("I", [len(encoded[2])]).tobytes())
    assert [ids[number] for number in range(5)] == [*names, names[2]] and ids.may_repeat
    assert list(ids.encoded(1, 2)) == encoded[1:3]


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
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Chunks whose rows were read."""
    chunks: list[Any] = []
    rows_of = _CachedSurvey._rows_of

    def read(self: _CachedSurvey, chunk: Any) -> Any:
        chunks.append(chunk)
        return rows_of(self, chunk)

    monkeypatch.setattr(_CachedSurvey, "_rows_of", read)
    return chunks


@pytest.mark.parametrize(
    ("graders", "is_new"),
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
    tmp_path: Path, decoded: list[Any], graders: list[dict[str, Any]], is_new: bool
) -> None:
    rows: list[dict[str, Any]] = [*ROWS, {"id": "l", "q": ["1", "2"], "level": "a", "expected": ["1"]}]
    surveyed(write(tmp_path, rows, prompt="{{ id }}"))
    eval_file = write(tmp_path, rows, prompt="{{ id }}", graders=graders)
    decoded.clear()
    survey = surveyed(eval_file)
    assert bool(decoded) == is_new, "only a new condition has to look at rows"
    assert survey == fresh(eval_file)
    decoded.clear()
    assert surveyed(eval_file) == survey
    assert not decoded, "the condition is cached"


def test_a_template_for_fields_that_some_rows_lack_is_tried_once(tmp_path: Path, decoded: list[Any]) -> None:
    surveyed(write(tmp_path))
    lenient = [SOME, {"type": "exact", "name": "lenient", "expected": "{{ reference | default('1') }}"}]
    for graders, is_new in ((lenient, True), (lenient, False), ([ALWAYS, SOME], False), (lenient, False)):
        eval_file = write(tmp_path, graders=graders)
        decoded.clear()
        assert surveyed(eval_file) == fresh(eval_file)
        assert bool(decoded) == is_new


def test_rows_and_graders_may_change_at_once(tmp_path: Path, sampled: list[str]) -> None:
    surveyed(write(tmp_path))
    rows = [*ROWS[:2], {**ROWS[2], "q": "0"}, *ROWS[3:]]
    eval_file = write(tmp_path, rows, graders=[SOME, {"type": "text", "contains": "please"}, ALWAYS])
    sampled.clear()
    survey = surveyed(eval_file)
    assert 0 < len(sampled) < len(rows)
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


NEW_LINE = '{"id": "n", "q": "2", "level": "c", "expected": "1"}\n'


@pytest.mark.parametrize(
    "edit",
    [
        lambda lines: [*lines, NEW_LINE],
        lambda lines: [*lines[:200], "\n", lines[200].replace("200 +", "9 +"), *lines[201:]],
        lambda lines: [*lines[:100], *lines[107:]],
        lambda lines: [*lines[300:], *lines[:300]],
        lambda lines: [NEW_LINE, *lines[50:], *lines[:30]],
        lambda lines: [*lines[:-1], lines[-1].rstrip()],
        lambda lines: ["\ufeff", *lines],
        lambda lines: lines,
    ],
)
def test_only_parts_with_lines_that_are_new_or_changed_are_surveyed(
    tmp_path: Path, sampled: list[str], edit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey_module, "_PART_BITS", 9)
    rows = [{**ROWS[number % 6], "id": f"s{number}", "q": f"{number} + 1"} for number in range(400)]
    eval_file, data = write(tmp_path, rows), tmp_path / "data.jsonl"
    surveyed(eval_file)
    data.write_text("".join(edit(data.read_text().splitlines(keepends=True))))
    sampled.clear()
    survey = surveyed(eval_file)
    assert len(sampled) < 60
    assert survey == fresh(eval_file)
    sampled.clear()
    assert surveyed(eval_file) == survey and not sampled, "the survey of the changed file was cached"


def test_few_bytes_are_written_for_few_new_rows(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "_PART_BITS", 12)
    rows = [{**ROWS[number % 6], "id": f"s{number}", "q": f"{number} + 1"} for number in range(20_000)]
    eval_file = write(tmp_path, rows)
    surveyed(eval_file)
    written: list[int] = []
    put = HomeDb.put

    def note(self: HomeDb, shelf: str, entries: Any, **options: Any) -> None:
        written.append(sum(map(len, entries.values())))
        put(self, shelf, entries, **options)

    monkeypatch.setattr(HomeDb, "put", note)
    size = (home / "home.db").stat().st_size
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write(NEW_LINE)
    surveyed(eval_file)
    assert 0 < written[0] < size / 20
    assert (home / "home.db").stat().st_size < size * 1.05, "the part that was replaced is gone"


def test_files_that_are_left_out_leave_the_parts_of_the_others(tmp_path: Path, sampled: list[str]) -> None:
    lines = [json.dumps(row) + "\n" for row in ROWS]
    (tmp_path / "more.jsonl").write_text("".join(lines[4:]))
    (tmp_path / "data.jsonl").write_text("".join(lines[:4]))
    eval_file = write(tmp_path, ROWS[:4], dataset={"path": "*.jsonl"})
    surveyed(eval_file)
    (tmp_path / "more.jsonl").unlink()
    sampled.clear()
    survey = surveyed(eval_file)
    assert not sampled and survey["count"] == 4
    assert survey == fresh(eval_file)


@pytest.mark.parametrize("again", ["same id", "same row"])
def test_rows_that_repeat_rows_of_cached_parts_are_refused(tmp_path: Path, again: str) -> None:
    eval_file = write(tmp_path)
    surveyed(eval_file)
    row = {**ROWS[0], **({"q": "other"} if again == "same id" else {})}
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(UsageError, match=r"sample id 's0' is already used at .*data\.jsonl:1"):
        surveyed(eval_file)


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
selections = st.sampled_from([{}, {}, {}, {"limit": 4}, {"where": "q == '1'"}, {"shuffle": 3}, {"offset": 2}])


def survey_or_error(make: Any, eval_file: Path) -> Any:
    try:
        return make(eval_file)
    except UsageError as error:
        return str(error)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(written_lines, max_size=15),
    st.lists(st.tuples(st.integers(0, 1), edits, selections, st.booleans()), min_size=1, max_size=4),
)
def test_any_history_gives_the_survey_of_reading_everything(home: Path, lines: list[str], changes: Any) -> None:
    """Rows are added, changed, removed, reordered; files keep their size and time; other rows are selected."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graders = [
            {"type": "exact", "name": "always", "expected": "{{ expected | default('') }}"},
            {"type": "exact", "name": "some", "expected": "1", "where": "level is defined and level == 'a'"},
        ]
        files = [[json.dumps(row) for row in ROWS], lines]
        for number, edited, selection, is_reversed in [(0, [], {}, False), *changes]:
            dataset = {"path": ["data.jsonl", "more.jsonl"], **selection}
            eval_file = write(folder, dataset=dataset, graders=graders)
            for start, count, inserted in edited:
                files[number][start : start + count] = inserted
            if is_reversed:
                files[number].reverse()
            for path, content_lines in zip(("data.jsonl", "more.jsonl"), files, strict=True):
                (folder / path).write_text("\n".join(content_lines))
                os.utime(folder / path, (1e9, 1e9))
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
