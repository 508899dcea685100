"""`home.db` is a cache: whatever is in its place, processes get what they stored, or nothing, and never an error."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.store.home import HomeDb
from tests.support.running import ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path

ENTRIES = {b"small": b"1", b"large": bytes(range(256)) * 40, b"": b""}
SHELF = "test one"


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, which is not there yet."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "home.db"


def put(entries: dict[bytes, bytes] = ENTRIES, shelf: str = SHELF, **options: Any) -> None:
    with HomeDb() as home:
        home.put(shelf, entries, **{"most": 3, **options})


def get(shelf: str = SHELF) -> dict[bytes, bytes]:
    with HomeDb() as home:
        entries = home.get_all(shelf)
        assert all(home.get(shelf, name) in (data, None) for name, data in entries.items())
        return entries


def test_entries_are_added_replaced_kept_and_removed(path: Path) -> None:
    assert get() == {} and not path.exists(), "reading makes no file"
    put()
    assert get() == ENTRIES and get("test two") == {}
    put({b"new": b"2", b"small": b"3"}, keep=[b"large"])
    assert get() == {b"new": b"2", b"small": b"3", b"large": ENTRIES[b"large"]}
    assert [each.name for each in path.parent.iterdir()] == ["home.db"]


def test_the_file_shrinks_when_entries_go(path: Path) -> None:
    put({b"": b"x" * 1_000_000})
    put({b"": b""})
    assert path.stat().st_size < 50_000


def test_the_shelves_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e9
    monkeypatch.setattr("time.time", lambda: now)
    put(shelf="other a")
    for number in range(4):
        now += 1000
        put(shelf=f"test {number}")
    assert [bool(get(f"test {number}")) for number in range(4)] == [False, True, True, True]
    with HomeDb() as home:
        home.touch("test 3")
        now += 2000
        home.touch("test 1")
        home.touch("test 3")
        now += 2000
    put(shelf="test 4")
    assert [bool(get(f"test {number}")) for number in range(1, 5)] == [True, False, True, True]
    assert get("other a") == ENTRIES


def test_any_byte_may_change_and_the_file_may_end_anywhere(path: Path) -> None:
    put()
    whole = path.read_bytes()
    again = 0
    damages = [whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :] for place in range(0, len(whole), 7)]
    damages += [whole[:length] for length in range(0, len(whole), 512)]
    for damaged in damages:
        path.write_bytes(damaged)
        assert get().items() <= ENTRIES.items()
        put()
        entries = get()
        assert entries.items() <= ENTRIES.items()
        again += entries == ENTRIES
    assert again > 0.97 * len(damages), "nearly all damaged files are replaced or repaired"


@pytest.mark.parametrize("kind", ["text", "database", "folder"])
def test_the_file_of_another_program_is_left_unchanged(path: Path, kind: str) -> None:
    path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("mine" * 50)
    else:
        sqlite3.connect(path).executescript("CREATE TABLE entries (mine); INSERT INTO entries VALUES (1)").close()
    before = None if kind == "folder" else path.read_bytes()
    put()
    assert get() == {}
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("content", ["another version", "empty", "zeros"])
def test_a_file_of_another_version_and_an_unfinished_one_are_replaced(path: Path, content: str) -> None:
    put({b"old": b"1"})
    if content == "another version":
        sqlite3.connect(path).execute("PRAGMA user_version = 2").connection.close()
    else:
        path.write_bytes(b"" if content == "empty" else bytes(4096))
    assert get() == {}
    put()
    assert get() == ENTRIES


def test_a_busy_file_holds_nothing_and_is_not_removed(path: Path) -> None:
    put()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert get() == {}
    put({b"new": b"2"})
    other.execute("ROLLBACK")
    other.close()
    assert get() == ENTRIES


def test_an_unfinished_transaction_is_undone(path: Path) -> None:
    put()
    script = f"""
import os, sqlite3
db = sqlite3.connect({str(path)!r}, isolation_level=None)
db.execute("PRAGMA cache_size = 1")
db.execute("BEGIN IMMEDIATE")
for number in range(200):
    db.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", ("test one", b"%d" % number, b"", bytes(5000)))
db.execute("DELETE FROM entries WHERE name = x'6c61726765'")
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert path.with_name("home.db-journal").exists(), "the process ended in the middle"
    assert get() == ENTRIES


WRITER = """
import sys
from holdfast.store.home import HomeDb
for number in range(40):
    with HomeDb() as home:
        home.put("test " + sys.argv[1], {b"%d" % number: bytes(20_000)}, most=9)
        assert set(home.get_all("test " + sys.argv[1]).values()) <= {bytes(20_000)}
        home.get_all("test 0")
"""


def run(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, *arguments], cwd=ROOT, env=environment() | dict(os.environ), **options
    )


def test_processes_share_the_file(path: Path) -> None:
    processes = [run(str(number)) for number in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def test_a_full_disk_is_no_failure(path: Path) -> None:
    put()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    assert run("7", preexec_fn=limit).wait(60) == 0
    assert get() == ENTRIES


def test_a_home_that_cannot_be_written_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put()
    connect = sqlite3.connect

    def connect_read_only(name: Any, **options: Any) -> sqlite3.Connection:
        return connect(f"file:{name}?mode=ro", uri=True, **options)  # as for everybody but root, whom the tests run as

    monkeypatch.setattr(sqlite3, "connect", connect_read_only)
    put({b"new": b"2"})
    assert get() == ENTRIES
