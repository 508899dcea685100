"""Datasets: every format, every selection, and a file and line for everything that is wrong with them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from base64 import b64encode
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.dataset import Dataset
from holdfast.data.readers import Layout, find_line_starts, read_hub, read_rows
from holdfast.data.survey import make_survey
from holdfast.errors import DataError, Fault
from holdfast.plan.plan import pending_trials
from holdfast.store.index import RunIndex
from tests.support.running import ROOT, environment, holdfast
from tests.support.specs import load, who, write_rows, write_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = [{"id": f"r{number}", "q": f"question {number}", "n": str(number)} for number in range(10)]


def dataset(folder: Path, path: str | list[str] = "d.jsonl", **keys: Any) -> Any:
    spec = load(folder, samples=None, dataset={"path": path, **keys}, prompt="hello", graders=None)
    return Dataset(spec)


def ids(folder: Path, path: str | list[str] = "d.jsonl", **keys: Any) -> Any:
    return [sample.id for sample in dataset(folder, path, **keys)]


def refusal(folder: Path, path: str | list[str] = "d.jsonl", **keys: Any) -> Any:
    """The message about a dataset that is wrong."""
    with pytest.raises(DataError) as caught:
        make_survey(dataset(folder, path, **keys))
    return str(caught.value)


def as_jsonl(rows: Any) -> Any:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_csv(rows: Any, delimiter: str = ",") -> Any:
    names = list(rows[0])
    return "".join(delimiter.join(line) + "\n" for line in [names, *(row.values() for row in rows)]).encode()


def as_parquet(path: Any, rows: Any) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
CONTENTS = {
    ".jsonl": as_jsonl(ROWS),
    ".ndjson": as_jsonl(ROWS),
    ".json": json.dumps(ROWS, indent=2).encode(),
    ".csv": as_csv(ROWS),
    ".tsv": as_csv(ROWS, "\t"),
    ".JSONL": as_jsonl(ROWS),
    ".TSV": as_csv(ROWS, "\t"),
}


class TestFormats:
    @pytest.mark.parametrize("packing", PACKERS)
    @pytest.mark.parametrize("ending", CONTENTS)
    def test_every_text_format_in_every_packing_gives_the_same_rows(
        self, tmp_path: Path, ending: Any, packing: Any
    ) -> None:
        name = f"d{ending}{packing}"
        (tmp_path / name).write_bytes(PACKERS[packing](CONTENTS[ending]))
        assert [sample.fields for sample in dataset(tmp_path, name)] == ROWS

    def test_parquet(self, tmp_path: Path) -> None:
        as_parquet(tmp_path / "d.parquet", ROWS)
        assert [sample.fields for sample in dataset(tmp_path, "d.parquet")] == ROWS

    def test_what_parquet_has_beyond_json_becomes_text(self, tmp_path: Path) -> None:
        import datetime
        import decimal

        rows = [
            {
                "id": 1,
                "day": datetime.date(2024, 1, 2),
                "price": decimal.Decimal("1.50"),
                "list": [1, 2],
                "deep": {"a": None, "t": datetime.datetime(2024, 1, 2, 3, 4)},
            }
        ]
        as_parquet(tmp_path / "d.parquet", rows)
        (sample,) = dataset(tmp_path, "d.parquet")
        assert sample.fields == {
            "id": 1,
            "day": "2024-01-02",
            "price": "1.50",
            "list": [1, 2],
            "deep": {"a": None, "t": "2024-01-02T03:04:00"},
        }

    @pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
    def test_a_declared_format_goes_before_the_name(self, tmp_path: Path, kind: str) -> None:
        if kind == "parquet":
            as_parquet(tmp_path / "data", ROWS)
        else:
            (tmp_path / "data").write_bytes(CONTENTS[f".{kind}"])
        assert len(ids(tmp_path, "data", format=kind)) == 10

    def test_a_name_without_a_known_suffix_needs_a_format(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_bytes(CONTENTS[".jsonl"])
        message = refusal(tmp_path, "data")
        assert "cannot tell the format" in message and "dataset.format" in message

    @pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".tsv"])
    def test_a_byte_order_mark_is_no_part_of_the_data(self, tmp_path: Path, ending: str) -> None:
        (tmp_path / f"d{ending}").write_bytes(b"\xef\xbb\xbf" + CONTENTS[ending])
        assert [sample.fields for sample in dataset(tmp_path, f"d{ending}")] == ROWS

    def test_blank_lines_are_passed_over_and_lines_still_counted(self, tmp_path: Path) -> None:
        (tmp_path / "d.jsonl").write_bytes(b'\n{"id": 1}\n   \n\r\n{"id": 2}\n\n')
        assert [(sample.id, sample.where[-2:]) for sample in dataset(tmp_path)] == [("1", ":2"), ("2", ":5")]

    def test_the_last_line_needs_no_newline(self, tmp_path: Path) -> None:
        (tmp_path / "d.jsonl").write_bytes(as_jsonl(ROWS).rstrip())
        assert len(ids(tmp_path)) == 10

    def test_csv_fields_may_hold_newlines_quotes_and_commas(self, tmp_path: Path) -> None:
        (tmp_path / "d.csv").write_bytes(b'id,q\n1,"a ""b"",\nc"\n2,x\n')
        assert [sample.fields["q"] for sample in dataset(tmp_path, "d.csv")] == ['a "b",\nc', "x"]

    def test_a_zst_file_of_several_frames_is_read_to_its_end(self, tmp_path: Path) -> None:
        whole = as_jsonl(ROWS)
        (tmp_path / "d.jsonl.zst").write_bytes(zstandard.compress(whole[:100]) + zstandard.compress(whole[100:]))
        assert ids(tmp_path, "d.jsonl.zst") == [row["id"] for row in ROWS]

    @settings(max_examples=30)
    @given(
        st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=9) | st.integers() | st.booleans()), max_size=5)
    )
    def test_any_rows_are_read_unchanged_from_jsonl(self, tmp_path_factory: pytest.TempPathFactory, rows: Any) -> None:
        path = tmp_path_factory.getbasetemp() / "any.jsonl"
        path.write_bytes(as_jsonl(rows))
        assert [row for _, row in read_rows(path, Layout())] == rows


class TestPaths:
    def test_globs_are_sorted_and_lists_keep_their_order(self, tmp_path: Path) -> None:
        for name in ("b", "a", "c"):
            write_rows(tmp_path / "parts" / f"{name}.jsonl", [{"id": name}])
        write_rows(tmp_path / "first.jsonl", [{"id": "first"}])
        assert ids(tmp_path, ["first.jsonl", "parts/*.jsonl"]) == ["first", "a", "b", "c"]
        assert ids(tmp_path, "**/[ab].jsonl") == ["a", "b"]

    def test_a_name_with_brackets_in_it_is_a_name_where_such_a_file_exists(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "d[1].jsonl", [{"id": "here"}])
        assert ids(tmp_path, "d[1].jsonl") == ["here"]

    @pytest.mark.parametrize("name", ["[old]", "a*b", "what?"])
    def test_a_folder_with_a_mark_in_its_name_is_a_folder(self, tmp_path: Path, name: str) -> None:
        write_rows(tmp_path / name / "parts" / "d.jsonl", [{"id": "here"}])
        write_rows(tmp_path / "aXb" / "parts" / "d.jsonl", [{"id": "elsewhere"}])
        assert ids(tmp_path / name, "parts/*.jsonl") == ["here"]
        assert ids(tmp_path / "aXb", str(tmp_path / "aXb" / "*" / "*.jsonl")) == ["elsewhere"]

    def test_a_glob_that_matches_nothing_is_refused(self, tmp_path: Path) -> None:
        assert "matches no file" in refusal(tmp_path, "no*.jsonl")

    def test_an_absolute_path_works(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "elsewhere" / "d.jsonl", ROWS)
        assert len(ids(tmp_path / "here", str(tmp_path / "elsewhere" / "d.jsonl"))) == 10

    def test_a_missing_file_and_a_folder_are_named(self, tmp_path: Path) -> None:
        assert f"{tmp_path / 'd.jsonl'}: no such file" in refusal(tmp_path)
        (tmp_path / "d.jsonl").mkdir()
        assert f"{tmp_path / 'd.jsonl'}: cannot be read" in refusal(tmp_path)


class TestSelection:
    @pytest.fixture(autouse=True)
    def rows(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "d.jsonl", ROWS)

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({"limit": 3}, [0, 1, 2]),
            ({"offset": 8}, [8, 9]),
            ({"offset": 2, "limit": 2}, [2, 3]),
            ({"offset": 9, "limit": 5}, [9]),
            ({"limit": 0.25}, [0, 1, 2]),
            ({"limit": 0.5, "offset": 4}, [4, 5, 6]),
            ({"where": "n | int > 6"}, [7, 8, 9]),
            ({"where": "n in ['1', '5'] or q == 'question 3'"}, [1, 3, 5]),
            ({"where": "n | int > 3", "offset": 1, "limit": 2}, [5, 6]),
        ],
        ids=str,
    )
    def test_limit_offset_and_where(self, tmp_path: Path, keys: Any, expected: Any) -> None:
        assert ids(tmp_path, **keys) == [f"r{number}" for number in expected]

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({"limit": 2}, [0, 1, 2, 3]),
            ({"limit": 1, "offset": 2}, [4, 5]),
            ({"limit": 0.3, "where": "n < 7"}, [0, 1, 2]),
            ({}, list(range(10))),
        ],
        ids=str,
    )
    def test_a_limit_by_a_field_holds_for_each_of_its_values(self, tmp_path: Path, keys: Any, expected: Any) -> None:
        write_rows(tmp_path / "d.jsonl", [{"id": f"r{n}", "n": n, "parity": n % 2} for n in range(10)])
        assert ids(tmp_path, limit_by="parity", **keys) == [f"r{number}" for number in expected]
        whole = ids(tmp_path, shuffle=3)
        assert ids(tmp_path, shuffle=3, limit=5, limit_by="parity") == whole

    @pytest.mark.parametrize("keys", [{"offset": 10}, {"where": "false"}])
    def test_a_selection_of_nothing_is_refused(self, tmp_path: Path, keys: Any) -> None:
        assert "no samples" in refusal(tmp_path, **keys)

    def test_no_name_of_a_field_breaks_where(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "d.jsonl", [{"id": f"r{n}", "n": n, "self": 1, "args": 2, "if": 3} for n in range(3)])
        assert ids(tmp_path, where="n == 2") == ["r2"]

    def test_shuffle_is_a_permutation_that_depends_on_the_seed_alone(self, tmp_path: Path) -> None:
        one, again, other = (ids(tmp_path, shuffle=seed) for seed in (1, 1, 2))
        assert one == again != other
        assert sorted(one) == sorted(other) == sorted(row["id"] for row in ROWS)
        assert one != [row["id"] for row in ROWS]

    def test_a_shuffled_limit_is_the_start_of_the_shuffled_whole(self, tmp_path: Path) -> None:
        whole = ids(tmp_path, shuffle=5)
        assert ids(tmp_path, shuffle=5, limit=4) == whole[:4]
        assert ids(tmp_path, shuffle=5, limit=4, offset=3) == whole[3:7]
        assert ids(tmp_path, shuffle=5, where="n | int < 5") == [name for name in whole if int(name[1:]) < 5]

    @given(st.integers(0, 100), st.integers(0, 10))
    @settings(max_examples=20)
    def test_a_new_row_never_reorders_the_others(
        self, tmp_path_factory: pytest.TempPathFactory, seed: Any, place: Any
    ) -> None:
        folder = tmp_path_factory.getbasetemp() / "shuffled"
        write_rows(folder / "d.jsonl", ROWS)
        before = ids(folder, shuffle=seed)
        write_rows(folder / "d.jsonl", [*ROWS[:place], {"id": "new"}, *ROWS[place:]])
        after = ids(folder, shuffle=seed)
        assert [name for name in after if name != "new"] == before


class TestIds:
    def test_the_field_id_or_the_field_named_or_a_digest_of_the_row(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "d.jsonl", [{"id": 7, "key": "k"}, {"id": None, "key": "l"}, {"key": "m"}])
        by_default = ids(tmp_path)
        assert by_default[0] == "7"
        assert all(len(name) == 12 and set(name) <= set("0123456789abcdef") for name in by_default[1:])
        assert ids(tmp_path, id="key") == ["k", "l", "m"]

    def test_a_digest_depends_on_the_content_and_not_on_the_place(self, tmp_path: Path) -> None:
        rows = [{"q": "a", "n": 1}, {"q": "b", "n": 2}]
        write_rows(tmp_path / "d.jsonl", rows)
        before = ids(tmp_path)
        write_rows(tmp_path / "d.jsonl", [{"q": "c"}, {"n": 2, "q": "b"}, rows[0]])
        assert ids(tmp_path)[1:] == before[::-1]

    def test_a_row_without_its_id_field_is_reported_with_its_line(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "d.jsonl", [{"key": "k"}, {"other": 1}])
        assert "d.jsonl:2: has no field 'key', which dataset.id names" in refusal(tmp_path, id="key")

    @pytest.mark.parametrize(
        ("rows", "words"),
        [
            ([{"id": "x"}, {"id": 5}, {"id": "5", "q": 1}], "sample id '5' is already used at"),
            ([{"q": 1}, {"q": 2}, {"q": 2}], "duplicate of"),
        ],
    )
    def test_a_duplicate_id_is_reported_with_both_places(self, tmp_path: Path, rows: Any, words: str) -> None:
        write_rows(tmp_path / "d.jsonl", rows)
        message = refusal(tmp_path)
        assert f"d.jsonl:3: {words}" in message and "d.jsonl:2" in message

    def test_ids_are_unique_over_all_files(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "a.jsonl", [{"id": "x"}])
        write_rows(tmp_path / "b.jsonl", [{"id": "x", "q": 1}])
        message = refusal(tmp_path, ["a.jsonl", "b.jsonl"])
        assert "b.jsonl:1" in message and "a.jsonl:1" in message

    def test_a_duplicate_that_is_not_selected_is_no_matter(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "d.jsonl", [{"id": "x"}, {"id": "y"}, {"id": "x", "q": 1}])
        assert make_survey(dataset(tmp_path, limit=2)).count == 2


@cache
def written(ending: str, count: int) -> bytes:
    """Return the content of a file with many rows."""
    many = [{"id": str(number), "q": f"question {number * 7919 % 1000}"} for number in range(count)]
    writers: dict[str, Any] = {".jsonl": as_jsonl, ".csv": as_csv, ".json": lambda value: json.dumps(value).encode()}
    content: bytes = writers[ending](many)
    return content


class TestWhatIsWrongWithFiles:
    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("d.jsonl", b'{"id": 1}\n{"id": 2\n', ["d.jsonl:2", "not valid JSON"]),
            ("d.jsonl", b'{"id": 1}\n{"id": 2}}\n', ["d.jsonl:2", "not valid JSON"]),
            ("d.jsonl", b'{"id": NaN}\n', ["d.jsonl:1", "not valid JSON"]),
            ("d.jsonl", b'{"id": 1}\n[1, 2]\n', ["d.jsonl:2", "an object with named fields, not list"]),
            ("d.jsonl", b'{"id": 1}\n{"q": "\xff"}\n', ["d.jsonl:2", "not UTF-8"]),
            ("d.jsonl", b'{"id": 1}\n' + b'{"a":' * 5000 + b"\n", ["d.jsonl", "recursion"]),
            ("d.jsonl", b"", ["d.jsonl", "no samples"]),
            ("d.jsonl", b"\n \n", ["d.jsonl", "no samples"]),
            ("d.json", b"[{]", ["d.json", "not valid JSON"]),
            ("d.json", b'{"id": 1}', ["d.json", "must be a list of objects", ".jsonl"]),
            ("d.json", b'{"id": 1}\n{"id": 2}\n', ["d.json", "not valid JSON"]),
            ("d.json", b'[{"id": 1}, 5]', ["d.json[1]", "not int"]),
            ("d.json", b"", ["d.json", "not valid JSON"]),
            ("d.csv", b"id,q\n1,a\n2,b,c\n", ["d.csv:3", "more values than the header's 2"]),
            ("d.csv", b"id,q\n1,a\n2\n", ["d.csv:3", "fewer values than the header's 2"]),
            ("d.csv", b'id,q\n1,"a\n', ["d.csv", "cannot be read"]),
            ("d.csv", b"id,q,id\n1,a,2\n", ["d.csv:1", "names a column twice: 'id'"]),
            ("d.csv", b"id,q\n1,\xff\n", ["d.csv", "not UTF-8"]),
            ("d.csv", b"id,q\n", ["no samples"]),
            ("d.parquet", b"PAR1 not parquet PAR1", ["d.parquet", "cannot be read"]),
            ("d.parquet", b"", ["d.parquet", "cannot be read"]),
        ],
        ids=lambda value: value if isinstance(value, str) else repr(value)[:30],
    )
    def test_a_problem_is_reported_with_file_and_line(
        self, tmp_path: Path, name: str, content: Any, words: Any
    ) -> None:
        (tmp_path / name).write_bytes(content)
        message = refusal(tmp_path, name)
        for word in words:
            assert word in message

    @pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz", ".zst"])
    @pytest.mark.parametrize("rows", [10, 20_000])
    @pytest.mark.parametrize("ending", [".jsonl", ".csv", ".json"])
    def test_a_packed_file_that_was_cut_off_is_never_taken_for_a_shorter_one(
        self, tmp_path: Path, packing: str, rows: int, ending: str
    ) -> None:
        packed = PACKERS[packing](written(ending, rows))
        name = f"d{ending}{packing}"
        (tmp_path / name).write_bytes(packed[: len(packed) * 2 // 3])
        assert f"{name}: cannot be read" in refusal(tmp_path, name)

    @pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz", ".zst"])
    def test_a_packed_file_with_rotten_bytes_is_refused(self, tmp_path: Path, packing: str) -> None:
        params = {".zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data)}
        packed = bytearray(params.get(packing, PACKERS[packing])(as_jsonl(ROWS * 50)))
        for place in range(len(packed) // 2, len(packed) // 2 + 8):
            packed[place] ^= 0xFF
        (tmp_path / f"d.jsonl{packing}").write_bytes(packed)
        assert f"d.jsonl{packing}" in refusal(tmp_path, f"d.jsonl{packing}")

    def test_a_missing_pyarrow_names_the_package_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        as_parquet(tmp_path / "d.parquet", ROWS)
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        message = refusal(tmp_path, "d.parquet")
        assert "needs pyarrow" in message and "pip install pyarrow" in message

    def test_a_missing_hub_library_names_the_package_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        message = refusal(tmp_path, "hf://owner/name")
        assert "`datasets` package" in message and "pip install datasets" in message


class TestTheHub:
    """The library is not installed here and the hub cannot be reached: a stand-in takes its place."""

    def test_rows_are_streamed_at_a_commit_that_is_kept_in_the_manifest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def read_hub(name: Any, split: Any, subset: Any, revision: Any) -> Iterator[None]:
            asked.append((name, split, subset, revision))
            yield from ((f"hf://{name}[{number}]", row) for number, row in enumerate(ROWS))

        monkeypatch.setattr("holdfast.data.dataset.read_hub", read_hub)
        monkeypatch.setattr(
            "holdfast.data.dataset.hub_commit", lambda name, revision: f"commit of {name} at {revision}"
        )
        samples = dataset(tmp_path, "hf://owner/name", split="train", subset="main", revision="v1", limit=2)
        assert [sample.id for sample in samples] == ["r0", "r1"]
        assert samples.revision == "commit of owner/name at v1"
        assert asked == [("owner/name", "train", "main", "commit of owner/name at v1")]


def test_images_of_a_hub_dataset_are_data_urls(tmp_path: Path) -> None:
    """The library reads a folder as it reads the hub, which cannot be reached here."""
    datasets = pytest.importorskip("datasets")
    picture = b"\xff\xd8\xff and more"
    features = datasets.Features({"image": datasets.Image(), "all": [datasets.Image()], "q": datasets.Value("string")})
    row = {"image": {"bytes": picture, "path": None}, "all": [{"bytes": picture, "path": "x.jpg"}], "q": "what?"}
    datasets.Dataset.from_list([row], features=features).to_parquet(str(tmp_path / "train.parquet"))
    [(_, fields)] = read_hub(str(tmp_path), "train", None, "main")
    url = f"data:image/jpeg;base64,{b64encode(picture).decode()}"
    assert fields == {"image": url, "all": [url], "q": "what?"}


class TestStreaming:
    def test_many_rows_never_sit_in_memory(self, tmp_path: Path) -> None:
        path = tmp_path / "d.jsonl"
        with path.open("w") as file:
            for number in range(50_000):
                file.write(json.dumps({"id": number, "q": f"question {number} " + "x" * 800}) + "\n")
        size = path.stat().st_size
        script = (
            "import sys, resource\n"
            "from pathlib import Path\n"
            "from holdfast.data.dataset import Dataset\n"
            "from holdfast.data.survey import make_survey\n"
            "from holdfast.spec.load import load_eval\n"
            "spec = load_eval(Path(sys.argv[1]))\n"
            "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "next(iter(Dataset(spec)))\n"
            "before = peak()\n"
            "survey = make_survey(Dataset(spec))\n"
            "count = sum(1 for _ in Dataset(spec))\n"
            "print(survey.count, count, (peak() - before) * (1 if sys.platform == 'darwin' else 1024))\n"
        )
        load(tmp_path, samples=None, dataset={"path": "d.jsonl"}, prompt="{{ q }}", graders=None)
        done = subprocess.run(
            [sys.executable, "-c", script, tmp_path / "eval.yaml"],
            capture_output=True,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        surveyed, counted, grown = map(int, done.stdout.split())
        assert surveyed == counted == 50_000
        assert grown < size * 0.75, "as Python objects the rows take several times the size of the file"

    def test_the_files_are_read_as_the_rows_are_wanted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_rows(tmp_path / "a.jsonl", [{"id": "a"}])
        (tmp_path / "b.jsonl").write_text("not JSON\n")
        samples = iter(dataset(tmp_path, ["a.jsonl", "b.jsonl"]))
        assert next(samples).id == "a"
        with pytest.raises(DataError, match=r"b\.jsonl:1"):
            next(samples)


class TestADatasetThatChangesUnderARun:
    @pytest.mark.parametrize(
        ("after", "where"),
        [
            ([ROWS[0], {**ROWS[1], "q": "changed"}, *ROWS[2:]], "d.jsonl:2"),
            (ROWS[:5], "fewer rows"),
            ([*ROWS, {"id": "new", "q": "more", "n": "11"}], "d.jsonl:11"),
        ],
        ids=["a changed row", "fewer rows", "more rows"],
    )
    def test_a_change_is_noticed(self, tmp_path: Path, after: Any, where: str) -> None:
        write_rows(tmp_path / "d.jsonl", ROWS)
        identity = who(tmp_path, samples=None, dataset={"path": "d.jsonl"}, prompt="{{ q }}", graders=None)
        write_rows(tmp_path / "d.jsonl", after)
        with pytest.raises(Fault, match="the dataset changed") as caught:
            list(pending_trials(identity.dataset, identity.survey, identity.work, RunIndex(lambda _: ())))
        assert caught.value.kind == "dataset_changed" and where in str(caught.value)

    @pytest.mark.parametrize(
        ("after", "message"),
        [
            (as_jsonl(ROWS[:2]), "the dataset changed"),
            (as_jsonl([*ROWS[:2], {**ROWS[2], "q": "x"}]), "the dataset changed"),
            (as_jsonl(ROWS[:2]) + b"{\n", "d.jsonl:3"),
            (None, "no such file"),
        ],
        ids=["fewer rows", "a changed row", "not JSON", "gone"],
    )
    def test_a_change_is_noticed_at_the_report_too(self, tmp_path: Path, after: Any, message: str) -> None:
        """The last trial changes it: there is no row left to notice it by, and no report may be made of it."""
        write_rows(tmp_path / "d.jsonl", ROWS[:3])
        if after is not None:
            (tmp_path / "after").write_bytes(after)
        (tmp_path / "agent.py").write_text(
            "from pathlib import Path\n"
            "here = Path(__file__).parent\n"
            "def reply(prompt):\n"
            "    if prompt.endswith('2'):\n"
            "        (here / 'd.jsonl').unlink()\n"
            "        if (here / 'after').exists():\n"
            "            (here / 'after').rename(here / 'd.jsonl')\n"
            "    return prompt\n"
        )
        spec = {"samples": None, "dataset": {"path": "d.jsonl"}, "prompt": "{{ q }}", "graders": None}
        path = write_spec(tmp_path, **spec, target={"python": "agent.py:reply"})
        done = holdfast("eval", path, cwd=tmp_path, check=3)
        assert message in done.stdout + done.stderr
        assert not list(tmp_path.glob("runs/*/*/metrics.json"))


def test_a_field_of_any_size_fits_into_csv(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("id,q\n1," + "x" * 1_000_000 + "\n")
    assert len(next(iter(dataset(tmp_path, "d.csv"))).fields["q"]) == 1_000_000


class TestFindingOneSample:
    @pytest.mark.parametrize("near", [0.0, 0.5, 1.0])
    @pytest.mark.parametrize(
        "keys",
        [
            {},
            {"id": "n"},
            {"limit": 4},
            {"offset": 3},
            {"where": "n != '2'"},
            {"ids": ["r1", "r7"]},
            {"shuffle": 3},
            {"limit": 5, "shuffle": 3},
        ],
        ids=str,
    )
    def test_a_sample_found_by_id_equals_the_sample_among_all(
        self, tmp_path: Path, keys: dict[str, Any], near: float
    ) -> None:
        (tmp_path / "d.jsonl").write_bytes(as_jsonl(ROWS))
        selected = {sample.id: sample for sample in dataset(tmp_path, **keys)}
        for name in [*(row["id"] for row in ROWS), *(row["n"] for row in ROWS), "question 1", "r"]:
            match = dataset(tmp_path, **keys).find(name, near)
            expected = selected.get(name)
            assert (match and match[:3]) == (expected and expected[:3])

    @pytest.mark.parametrize("style", [{}, {"ensure_ascii": False}, {"separators": (",", ":")}, {"indent": None}])
    def test_names_of_any_form_are_found(self, tmp_path: Path, style: dict[str, Any]) -> None:
        names = [7, 17, "Bär", 'a"b', "tab\t", "x/y", "日本"]
        rows = [{"id": name, "q": "7 and 17"} for name in names]
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(row, **style) + "\n" for row in rows), "utf-8")
        for name in names:
            match = dataset(tmp_path).find(str(name))
            assert match is not None and match.fields["id"] == name

    def test_other_formats_and_rows_without_an_id_are_found(self, tmp_path: Path) -> None:
        (tmp_path / "d.csv").write_bytes(as_csv(ROWS))
        assert dataset(tmp_path, "d.csv").find("r3").fields["q"] == "question 3"
        (tmp_path / "d.jsonl").write_bytes(as_jsonl([{"q": "one"}, {"q": "two"}]))
        (first, second) = dataset(tmp_path)
        assert dataset(tmp_path).find(second.id) == second != first


class TestLineStarts:
    @given(st.lists(st.lists(st.sampled_from(["", "  ", "row"]), max_size=6), min_size=1, max_size=3), st.data())
    def test_rows_from_a_place_are_those_that_iterating_has_left(
        self, tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], data: st.DataObject
    ) -> None:
        folder, count = tmp_path_factory.mktemp("lines"), 0
        for name, contents in enumerate(files):
            lines = []
            for line in contents:
                lines.append(json.dumps({"id": count}) if line == "row" else line)
                count += line == "row"
            end = "\n" if data.draw(st.booleans()) else ""
            (folder / f"{name}.jsonl").write_text("\n".join(lines) + end)
        rows = dataset(folder, [f"{name}.jsonl" for name in range(len(files))])
        assert rows.has_row_per_line
        everything = list(rows.rows())
        positions = sorted(data.draw(st.lists(st.integers(0, count))))
        starts = find_line_starts(rows.files, positions)
        assert len(starts) == sum(position < count for position in positions)
        for position, start in zip(positions, starts, strict=False):
            assert list(rows.rows_from(start)) == everything[position:]
