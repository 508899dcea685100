"""Lines of a file found by what they contain, or by their time, without reading the others."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.store import lines
from holdfast.store.lines import find_lines, is_sound, read_blocks, seal, search

if TYPE_CHECKING:
    from pathlib import Path

texts = st.lists(st.text(st.sampled_from("ab "), max_size=12), max_size=40)


@given(texts, st.text(st.sampled_from("ab "), min_size=1, max_size=3), st.integers(-5, 700), st.booleans())
def test_every_line_that_contains_the_words_is_found_once_wherever_the_search_begins(
    tmp_path_factory: pytest.TempPathFactory, content: list[str], words: str, start: int, torn: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "file"
    data = "".join(f"{line}\n" for line in content) + ("aaabbb" if torn else "")
    path.write_text(data)
    hits = dict(find_lines(path, words.encode(), start))
    offsets = [sum(len(line) + 1 for line in content[:number]) for number in range(len(content))]
    expected = {offset: line.encode() for offset, line in zip(offsets, content, strict=True) if words in line}
    assert hits == expected
    assert len(list(find_lines(path, words.encode(), start))) == len(expected)


@given(
    st.lists(st.sampled_from([b"", b"{}", b'"}', seal(b'{"a":1}')[:-1], seal(b'{"b":"' + b"x" * 90 + b'"}')[:-1]])),
    st.lists(st.integers(0, 700), max_size=4),
    st.integers(1, 100),
    st.booleans(),
)
def test_blocks_between_any_offsets_hold_every_whole_line_once(
    tmp_path_factory: pytest.TempPathFactory, content: list[bytes], cuts: list[int], block: int, torn: bool
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "file"
    path.write_bytes(b"".join(line + b"\n" for line in content) + (b"torn" if torn else b""))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_BLOCK", block)
        for start, stop in pairwise([0, *sorted(cuts), 1 << 40]):
            for each in read_blocks(path, start, stop):
                assert each.all_sound() == all(map(is_sound, each.lines()))
                seen += zip([each.offset + begin for begin in each.starts], each.lines(), strict=True)
    offsets = [sum(len(line) + 1 for line in content[:number]) for number in range(len(content))]
    assert seen == list(zip(offsets, content, strict=True))


def test_lines_that_are_longer_than_a_block_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes((b"x" * 999 + b"\n") * 20)
    monkeypatch.setattr(lines, "_BLOCK", 100)
    pread, sizes = os.pread, []

    def counting(fd: int, length: int, offset: int) -> bytes:
        data = pread(fd, length, offset)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counting)
    assert sum(len(block.lines()) for block in read_blocks(path, 0, 1 << 40)) == 20
    assert sum(sizes) <= 1.1 * path.stat().st_size


def test_windows_cut_no_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_BLOCK", 7)
    monkeypatch.setattr(lines, "_FIRST_STEP", 2)
    path = tmp_path / "file"
    path.write_text("".join(f"{'x' * number}needle\n" for number in range(20)))
    assert len(list(find_lines(path, b"needle"))) == 20


def test_a_file_may_be_truncated_while_it_is_searched(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes((b"x" * 9_999 + b"\n") * 1_000)
    found = find_lines(path, b"x\n", 4_000_000)
    assert next(found) == (4_000_000, b"x" * 9_999)
    os.truncate(path, 15_000)
    assert list(found) == [(0, b"x" * 9_999)]


def test_damaged_lines_and_missing_files_give_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    sound = seal(b'{"key":"a"}')
    path.write_bytes(sound + sound.replace(b'"a"', b'"b"') + sound[:-1])
    assert [is_sound(line.data) for line in search(path, b'"key"')] == [True]
    assert list(find_lines(tmp_path / "none", b"x")) == []
    (tmp_path / "empty").touch()
    assert list(find_lines(tmp_path / "empty", b"x")) == []
