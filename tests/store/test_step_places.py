"""Where the calls of a trial are: found without a search of the journal, all of them, whatever becomes of the cache."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from typing import TYPE_CHECKING

import pytest

from holdfast.store.journal import Journal, append_lines
from holdfast.store.lines import scan, search, search_parts
from holdfast.store.records import Step, Usage, to_line
from holdfast.store.rundir import RunDir
from holdfast.store.step_places import places_of

if TYPE_CHECKING:
    from pathlib import Path

KEYS = [f"sha256:{number:064x}" for number in range(20)]


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.store.step_places._STRETCH", 8_000)
    monkeypatch.setattr("holdfast.store.step_places._NEAR", 1_000)


def make_lines(count: int, seed: int = 0, keys: list[str] = KEYS) -> list[bytes]:
    """Calls of five trials at a time, as they end: a few of each, of different lengths, in no order."""
    chance = random.Random(seed)
    return [
        to_line(
            Step(
                keys[min(len(keys) - 1, number * len(keys) // count + chance.randrange(5))],
                "s",
                1,
                number,
                "model",
                "r",
                1,
                chance.randbytes(chance.randrange(1, 400)).hex(),
                Usage(),
                float(number),
                0.1,
            )
        )
        for number in range(count)
    ]


def record(folder: Path, lines: list[bytes]) -> Path:
    """Append calls as a run does, in batches, and return the journal."""

    async def main() -> None:
        journal = Journal(folder, notice=pytest.fail)
        for start in range(0, len(lines), 7):
            await asyncio.gather(*[journal.write("steps", line) for line in lines[start : start + 7]])
        await journal.close()

    asyncio.run(main())
    return folder / "steps.jsonl"


def words(key: str) -> bytes:
    return b'{"key":"%b",' % key.encode()


def check_all(journal: Path, keys: list[str] = KEYS) -> int:
    """Check that the calls of each trial are found, and return the most bytes that one of the searches read."""
    searched = []
    for key in keys:
        parts = places_of(journal, words(key))
        assert list(search_parts(journal, words(key), parts)) == list(search(journal, words(key)))
        searched.append(sum(end - start for start, end in parts))
    return max(searched)


def cache_of(journal: Path) -> Path:
    (cache,) = journal.parent.glob(".index/steps*")
    return cache


def test_the_calls_of_a_trial_are_found_where_a_run_has_written_them(tmp_path: Path) -> None:
    journal = record(tmp_path, make_lines(1_000))
    assert check_all(journal) < journal.stat().st_size / 4
    assert sum(end - start for start, end in places_of(journal, words("unknown"))) < 8_000 + 7 * 1_100, "the end alone"


def test_what_was_appended_unnoted_is_searched(tmp_path: Path) -> None:
    lines = make_lines(600)
    record(tmp_path, lines[:200])
    append_lines(tmp_path / "steps.jsonl", b"".join(lines[200:400]))
    journal = record(tmp_path, lines[400:])
    append_lines(journal, lines[0])
    check_all(journal)
    between = len(b"".join(lines[:200])), len(b"".join(lines[:400]))
    parts = places_of(journal, words("unknown"))
    assert any(start <= between[0] and between[1] <= end for start, end in parts)


def test_what_was_there_before_the_first_note_is_searched(tmp_path: Path) -> None:
    lines = make_lines(400)
    append_lines(tmp_path / "steps.jsonl", b"".join(lines[:200]))
    journal = record(tmp_path, lines[200:])
    assert check_all(journal) < journal.stat().st_size
    assert places_of(journal, words("unknown"))[0] == (0, len(b"".join(lines[:200])))


def test_what_lies_far_between_two_calls_of_a_trial_is_not_read(tmp_path: Path) -> None:
    first, *others, last = make_lines(7, keys=KEYS[:1])
    between = make_lines(8, seed=1, keys=KEYS[1:])
    journal = record(tmp_path, [first, *between, last, *others, *make_lines(40, seed=2, keys=KEYS[1:])])
    assert places_of(journal, words(KEYS[0]))[0] == (0, len(first))
    check_all(journal)


def test_a_process_that_reads_the_journal_under_its_lease_notes_it_once(tmp_path: Path) -> None:
    journal = record(tmp_path, make_lines(1_000))
    cache = cache_of(journal)
    cache.unlink()
    RunDir(tmp_path).load(repair=False)
    assert not cache.exists(), "nothing is written without the lease"
    for _ in range(2):
        RunDir(tmp_path).load(repair=True)
    assert check_all(journal) < journal.stat().st_size
    starts = [line.data.partition(b'"start":')[2].partition(b",")[0] for line in scan(cache)]
    assert len(starts) == len(set(starts)) == 1, "the journal is read in large blocks"


def test_each_worker_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "workers" / "a").mkdir(parents=True)
    first, second = record(tmp_path, make_lines(300)), record(tmp_path / "workers" / "a", make_lines(300, seed=1))
    assert {path.name for path in (tmp_path / ".index").iterdir()} == {"steps", "steps.a"}
    for journal in (first, second):
        assert check_all(journal) < journal.stat().st_size


class TestCachesThatDoNotFit:
    @pytest.fixture
    def journal(self, tmp_path: Path) -> Path:
        return record(tmp_path / "", make_lines(300))

    def test_a_torn_or_damaged_one_costs_no_call(self, journal: Path) -> None:
        cache, whole = cache_of(journal), cache_of(journal).read_bytes()
        for place in range(0, len(whole), 401):
            cache.write_bytes(whole[:place])
            check_all(journal, KEYS[::6])
            cache.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            check_all(journal, KEYS[::6])

    def test_one_with_other_trials_than_were_noted_costs_no_call(self, journal: Path) -> None:
        cache = cache_of(journal)
        cache.write_bytes(re.sub(rb'"[0-9a-f]{16}":\[', b'"0123456789abcdef":[', cache.read_bytes()))
        assert check_all(journal) == journal.stat().st_size

    def test_a_line_behind_a_torn_one_costs_no_call(self, journal: Path) -> None:
        cache = cache_of(journal)
        cache.write_bytes(cache.read_bytes()[:-40])
        record(journal.parent, make_lines(300, seed=1))
        check_all(journal)

    def test_one_that_says_all_twice_returns_no_call_twice(self, journal: Path) -> None:
        cache = cache_of(journal)
        cache.write_bytes(2 * cache.read_bytes())
        assert check_all(journal) < journal.stat().st_size

    def test_one_that_can_be_neither_read_nor_written_stops_no_run(self, tmp_path: Path) -> None:
        (tmp_path / ".index" / "steps").mkdir(parents=True)
        journal = record(tmp_path, make_lines(300))
        assert check_all(journal) == journal.stat().st_size

    def test_that_of_another_journal_costs_no_call(self, journal: Path, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        other = record(tmp_path / "other", make_lines(300, seed=1))
        shutil.copy(cache_of(other), cache_of(journal))
        assert check_all(journal) == journal.stat().st_size

    def test_a_journal_that_was_replaced_is_searched(self, journal: Path) -> None:
        lines = journal.read_bytes().splitlines(keepends=True)
        copy = journal.with_name("copy")
        copy.write_bytes(b"".join([*lines[:20], *lines[21:]]))
        copy.replace(journal)
        assert check_all(journal) == journal.stat().st_size

    def test_a_journal_that_lost_its_end_and_grew_again_is_searched_from_there(self, journal: Path) -> None:
        lines = journal.read_bytes().splitlines(keepends=True)
        kept = len(b"".join(lines[:150]))
        with journal.open("r+b") as file:
            file.truncate(kept)
        append_lines(journal, b"".join(make_lines(150, seed=1)))
        assert journal.stat().st_size - kept <= check_all(journal) < journal.stat().st_size

    def test_a_journal_that_is_gone_has_no_calls(self, journal: Path) -> None:
        journal.unlink()
        assert places_of(journal, words(KEYS[0])) == []
