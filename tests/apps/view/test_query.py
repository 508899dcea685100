"""Filters select what a plain loop over the trials selects; mistakes in them are named with their position."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.apps.view.columns import field_value, open_columns, read_rows
from holdfast.apps.view.query import parse_query, quote
from holdfast.apps.view.search import TextSearch, contains_text, fold, search_lines
from holdfast.apps.view.snapshot import facets, select
from holdfast.errors import QueryError
from holdfast.report.run_view import GradedTrial, RunView
from holdfast.report.trial_table import STATUSES
from holdfast.store.lines import LineRef
from holdfast.store.records import Output, Timing, Usage, to_line
from tests.apps.view import journals
from tests.apps.view.journals import GRADERS, JournaledRun, WriteError, WriteOutput, whole_trial

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holdfast.apps.view.columns import Columns, TrialRow


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Columns:
    """A run with trials of every kind."""
    run = JournaledRun(tmp_path_factory.mktemp("run"))
    stopped = WriteOutput("workers/a", 1, 2, 1, True, True, 2, 2, False)
    trials = [
        *whole_trial(0, 1),
        *whole_trial(0, 2, text=2, score=0.5),
        *whole_trial(1, 1, text=3, score=0.7),
        stopped,
        journals.WriteGrade("", stopped, 0, "failed", 0.0, 1, True, "polite"),
        WriteError("", 2, 1, "target", "timeout"),
        *whole_trial(2, 2, text=1)[:2],
    ]
    for event in trials:
        run.append(event)
    return open_columns(run.rundir)


def line_of(columns: Columns, row: int) -> bytes | None:
    """Return the line of a row's output."""
    ((file, at, length),) = columns.table.select("file, at, len", "n = ?", (row,))
    return None if file is None else LineRef(columns.table.files[file], at, length).read()


class Trial:
    """A trial as a plain loop sees it."""

    def __init__(self, row: TrialRow, fields: dict[str, Any], line: bytes | None) -> None:
        self.row = row
        self.fields = fields
        self.line = line

    def number(self, name: str) -> float | None:
        """Return a number of the trial, or a grader's score."""
        if name in GRADERS:
            return self.row.graders.get(name, ("", None))[1]
        value: float | None = getattr(self.row, name)
        return value

    def says(self, text: str) -> bool:
        """Return True if a text is in the sample's id or in what was said."""
        return fold(text) in fold(self.row.sample) or (self.line is not None and contains_text(self.line, fold(text)))


@pytest.fixture(scope="module")
def trials(columns: Columns) -> list[Trial]:
    """Return all trials, read one by one."""
    fields: dict[tuple[str, int], dict[str, Any]] = {}
    for trial in RunView(columns.rundir).everything():
        done = isinstance(trial, GradedTrial)
        place = (trial.output.sample, trial.output.trial) if done else (trial.sample, trial.trial)
        fields[place] = trial.fields
    return [
        Trial(row, fields[row.sample, row.trial], line_of(columns, row.row))
        for row in read_rows(columns, range(columns.rows))
    ]


Check = tuple[str, "Callable[[Trial], bool]"]


def _status(status: str) -> Check:
    return status, lambda trial: trial.row.status == status


def _grader(name: str, status: str) -> Check:
    return f"{name}:{status}", lambda trial: trial.row.graders.get(name, ("",))[0] == status


def _number(name: str, sign: str, limit: float) -> Check:
    def holds(trial: Trial) -> bool:
        value = trial.number(name)
        if value is None:
            return False
        return {"<": value < limit, "<=": value <= limit, "=": value == limit, "!=": value != limit}.get(
            sign, value > limit if sign == ">" else value >= limit
        )

    return f"{name}{sign}{limit}", holds


def _field(name: str, value: str, equal: bool) -> Check:
    def holds(trial: Trial) -> bool:
        has = trial.fields != {} and (field_value(trial.fields, name) or "(none)") == value
        return has == equal

    return f"{name}{'=' if equal else '!='}{quote(value)}", holds


def _text(text: str) -> Check:
    return f'"{text}"' if quote(text) == text else quote(text), lambda trial: trial.says(text)


_leaves = st.one_of(
    st.builds(_status, st.sampled_from(STATUSES)),
    st.builds(_grader, st.sampled_from(GRADERS), st.sampled_from(STATUSES)),
    st.just(("checkpoint@1:failed", lambda trial: trial.row.graders.get(GRADERS[0], ("",))[0] == "failed")),
    st.builds(
        _number,
        st.sampled_from(["score", "tokens", "cost", "seconds", "turns", "attempt", "trial", *GRADERS]),
        st.sampled_from(["<", "<=", "=", "!=", ">=", ">"]),
        st.sampled_from([0.0, 0.5, 0.7, 1.0, 2.0, 15.0]),
    ),
    st.builds(_field, st.just("level"), st.sampled_from(["easy", "hard", "none"]), st.booleans()),
    st.builds(_field, st.just("tag.kind"), st.sampled_from(["odd", "(none)"]), st.booleans()),
    st.just(("stopped", lambda trial: trial.row.stopped is not None)),
    st.just(("reused", lambda _: False)),
    st.just(("stop=stop", lambda trial: trial.row.stop == "stop")),
    st.just(("error=timeout", lambda trial: trial.row.error.startswith("timeout"))),
    st.just(("sample=s1", lambda trial: trial.row.sample == "s1")),
    st.builds(_text, st.sampled_from(["yes", "S1", "é", 'SAID "NO', "über", "content", "no such words"])),
)


def _both(checks: list[Check]) -> Check:
    return " ".join(text for text, _ in checks), lambda trial: all(holds(trial) for _, holds in checks)


def _either(checks: list[Check]) -> Check:
    return f"({' or '.join(text for text, _ in checks)})", lambda trial: any(holds(trial) for _, holds in checks)


def _opposite(check: Check) -> Check:
    return f"-({check[0]})", lambda trial: not check[1](trial)


_checks = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(_both)
        | st.lists(inner, min_size=1, max_size=3).map(_either)
        | inner.map(_opposite)
    ),
    max_leaves=6,
)


@settings(max_examples=120)
@given(check=_checks)
def test_a_filter_selects_what_a_plain_loop_selects(columns: Columns, trials: list[Trial], check: Check) -> None:
    text, holds = check
    snapshot = select(columns, parse_query(text))
    assert snapshot.complete
    assert list(snapshot.rows) == [trial.row.row for trial in trials if holds(trial)]
    assert sum(facet.count for facet in facets(columns, snapshot).get("status", [])) == len(snapshot.rows)


@pytest.mark.parametrize("name", ["score", "tokens", "seconds", "attempt", "trial", *GRADERS])
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_are_sorted_by_numbers_with_unknown_ones_last(
    columns: Columns, trials: list[Trial], name: str, reverse: bool
) -> None:
    snapshot = select(columns, parse_query(""), f"-{name}" if reverse else name)
    numbers = [trials[row].number(name) for row in snapshot.rows]
    known = [number for number in numbers if number is not None]
    assert known == sorted(known, reverse=reverse)
    assert numbers == known + [None] * (len(trials) - len(known))


@pytest.mark.parametrize(("name", "reverse"), [("sample", False), ("sample", True), ("level", False)])
def test_rows_are_sorted_by_texts(columns: Columns, trials: list[Trial], name: str, reverse: bool) -> None:
    snapshot = select(columns, parse_query(""), f"-{name}" if reverse else name)
    values = [trials[row].row.sample if name == "sample" else trials[row].fields[name] for row in snapshot.rows]
    assert values == sorted(values, reverse=reverse)


def test_each_facet_counts_the_rows_that_its_query_selects(columns: Columns) -> None:
    everything = select(columns, parse_query(""))
    by_name = facets(columns, everything)
    assert set(by_name) >= {"status", "checkpoint@1", *GRADERS, "stop", "error", "level"}
    for each in by_name.values():
        for facet in each:
            assert len(select(columns, parse_query(facet.query)).rows) == facet.count > 0


def test_a_list_in_a_row_fulfils_what_one_of_its_items_does(columns: Columns) -> None:
    samples = {row.sample for row in read_rows(columns, select(columns, parse_query("expected=one")).rows)}
    assert samples == {"s1"}


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("failed (passed", 7, "`(` is not closed"),
        ("failed) passed", 6, "`)` without `(`"),
        ('error "words', 6, "a quotation mark is not closed"),
        ("failed >3", 7, "`>` needs a name before it"),
        ("seconds> 30", 8, "`seconds>` needs a value after it"),
        ("correct:wrong", 8, "`wrong` is not a status"),
        ("failed or", 9, "`or` needs a condition after it"),
        ("or failed", 0, "`or` needs a condition before it"),
        ("seconds>soon", 8, "`seconds` is a number and cannot be compared with `soon`"),
        ("passed corect:failed", 7, "the run has no grader `corect` (did you mean 'correct'?)"),
        ("passed lvel=hard", 7, "no row has a field `lvel` (did you mean 'level'?)"),
        ("(" * 60 + "failed" + ")" * 60, 51, "too many parentheses or minus signs inside each other"),
        ("x" * 5000, 4000, "the filter has 5,000 characters, at most 4,000 are allowed"),
    ],
)
def test_a_mistake_is_named_with_its_position(columns: Columns, text: str, position: int, message: str) -> None:
    with pytest.raises(QueryError) as caught:
        select(columns, parse_query(text))
    assert (caught.value.message, caught.value.position) == (message, position)


@given(st.text(max_size=30))
def test_any_text_is_a_query_or_a_mistake_in_it(text: str) -> None:
    try:
        parse_query(text)
    except QueryError as error:
        assert 0 <= error.position <= len(text)


@given(st.text(min_size=1, max_size=10))
def test_a_quoted_text_is_read_as_it_was(text: str) -> None:
    query = parse_query(f"sample={quote(text)}")
    assert query.comparisons[0].value == text


def _line(content: str) -> bytes:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": content}], "name": content}]
    output = Output(
        "k", "s", 1, 1, messages, "", 1, "stop", "empty", Usage(), Timing(0.0, 0.0), "d", state={content: 1}
    )
    return to_line(output)[:-1]


@given(st.text(max_size=20), st.text(min_size=1, max_size=6), st.text(max_size=20), st.booleans())
def test_a_search_in_lines_finds_what_reading_them_finds(before: str, text: str, after: str, swap: bool) -> None:
    lines = [_line(content) for content in (before + text + after, before, after, before + text.swapcase() + after)]
    journal = b"".join(line + b"\n" for line in lines)
    place, places = 0, []
    for line in lines:
        places.append(place)
        place += len(line) + 1
    needle = text.swapcase() if swap else text
    found = search_lines(
        lambda _, offset, size: journal[offset : offset + size], places, [len(line) for line in lines], needle
    )
    hits = [row for rows in found for row in rows]
    assert hits == [row for row, line in enumerate(lines) if contains_text(line, fold(needle))]
    assert needle != text or 0 in hits


@pytest.mark.parametrize("text", ["words", "wörds"])
def test_a_journal_may_be_truncated_while_it_is_searched(tmp_path: Path, text: str) -> None:
    line = _line(f"these {text}")
    journal = tmp_path / "outputs.jsonl"
    journal.write_bytes((line + b"\n") * 2_000)
    places = [number * (len(line) + 1) for number in range(2_000)]
    with journal.open("rb", buffering=0) as file:
        found = search_lines(
            lambda _, offset, size: os.pread(file.fileno(), size, offset), places, [len(line)] * 2_000, text
        )
        rows = next(found)
        os.truncate(journal, len(rows) * (len(line) + 1) + 20)
        assert rows == list(range(len(rows)))
        assert not any(found), "only the beginning of the next line is there"


def test_keys_and_roles_are_not_what_was_said(columns: Columns) -> None:
    assert len(select(columns, parse_query('"assistant"')).rows) == 0
    assert len(select(columns, parse_query('"messages"')).rows) == 0


def test_a_search_yields_rows_in_order_and_can_be_given_up(columns: Columns) -> None:
    rows = list(TextSearch(columns.table, "and now?"))
    assert rows == [row for row in range(columns.rows) if line_of(columns, row) and row not in _stopped(columns)]
    ended = TextSearch(columns.table, "and now?")
    ended.stop()
    with pytest.raises(OSError, match="exit code -9"):
        list(ended)


def _stopped(columns: Columns) -> set[int]:
    return set(select(columns, parse_query("stopped")).rows)


def test_a_snapshot_is_kept_until_a_row_changes(tmp_path: Path) -> None:
    run = JournaledRun(tmp_path)
    for event in whole_trial(0, 1):
        run.append(event)
    columns = open_columns(run.rundir)
    first = select(columns, parse_query("passed"))
    assert select(columns, parse_query("passed")) is first
    for event in whole_trial(0, 2):
        run.append(event)
    assert select(columns, parse_query("passed")) is first
    assert columns.refresh() == 1
    assert list(select(columns, parse_query("passed")).rows) == [0, 1]
    assert list(first.rows) == [0]


def test_facets_of_a_page_count_present_rows_after_the_table_was_made_again(tmp_path: Path) -> None:
    run = JournaledRun(tmp_path)
    for event in whole_trial(1, 1):
        run.append(event)
    columns = open_columns(run.rundir)
    before = select(columns, parse_query("passed"))
    for event in whole_trial(0, 1, score=0.0):  # which other outcomes then follow
        run.append(event)
    data = run.folder / "data.jsonl"
    data.write_text(data.read_text() + '{"id": "s9", "question": "nine", "expected": "9", "level": "easy"}\n')
    assert columns.refresh() > 0
    assert [(facet.value, facet.count) for facet in facets(columns, before)["status"]] == [("passed", 1)]
