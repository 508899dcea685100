"""Every file has a version, and one rule holds for all files that are read."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import evaluate
from holdfast.display.displays import Events
from holdfast.errors import ConfigError, VersionError
from holdfast.plan.plan import Plan
from holdfast.spec.load import load_eval
from holdfast.spec.schema import SCHEMA_VERSION
from holdfast.store.records import SCHEMA_VERSION as RUN_VERSION
from holdfast.versions import Version, check_version, parse_version
from tests.support.patterns import answered, finished_run
from tests.support.running import holdfast, lines

if TYPE_CHECKING:
    from pathlib import Path

EVAL = """\
name: e
samples: [{id: a, question: q, expected: x}]
target: {model: m}
prompt: "{{ question }}"
graders: [{type: exact}]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return finished_run(tmp_path_factory.mktemp("finished") / "lab", answered(2, 1))


@pytest.fixture
def run(finished: Any, tmp_path: Path) -> Any:
    """A finished run of the test's own."""
    return shutil.copytree(finished, tmp_path / "runs" / "e" / finished.name)


def say(run: Any, version: Any, *names: Any) -> None:
    """Make files of a run say another version, or none."""
    for name in names:
        data = json.loads((run / name).read_text())
        data.pop("schemaVersion")
        (run / name).write_text(json.dumps(data if version is None else {"schemaVersion": version, **data}))


class TestTheRule:
    @given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
    def test_versions_are_in_the_order_of_their_numbers(
        self, major: Any, minor: Any, other_major: Any, other_minor: Any
    ) -> None:
        one, other = Version(major, minor), Version(other_major, other_minor)
        assert parse_version(str(one)) == one
        assert (one < other) == ((major, minor) < (other_major, other_minor))

    @pytest.mark.parametrize("written", ["abc", "", "1", "1.", ".1", "1.0.0", "v1.0", "1.0 ", "01.0", "1.x", "-1.0"])
    def test_an_invalid_version_is_reported_with_the_expected_form(self, written: str) -> None:
        with pytest.raises(VersionError, match=r"x\.yaml: .* is not a version: write MAJOR\.MINOR in quotes"):
            check_version("x.yaml", written, "1.1")

    @pytest.mark.parametrize("written", [1, True, [], {}, 1e30, float("nan")])
    def test_a_value_of_another_kind_is_not_a_version(self, written: Any) -> None:
        with pytest.raises(VersionError, match="is not a version"):
            check_version("x.yaml", written, "1.1")

    @pytest.mark.parametrize("written", ["1.0", "1.1", 1.0, 1.1])
    def test_the_same_and_earlier_minor_versions_are_accepted_without_a_notice(self, written: float | str) -> None:
        assert check_version("x.yaml", written, "1.1") is None

    @pytest.mark.parametrize("written", ["1.2", "1.10", "1.100"])
    def test_a_newer_minor_version_is_accepted_with_a_notice(self, written: str) -> None:
        notice = check_version("x.yaml", written, "1.1")
        assert notice is not None and f"version {written} is newer than this Holdfast, which knows 1.1" in notice

    @pytest.mark.parametrize(
        ("written", "remedy"),
        [
            ("0.9", "Use the release"),
            ("2.0", "Upgrade Holdfast"),
            ("10.1", "Upgrade Holdfast"),
            (None, "Restore the file"),
        ],
    )
    def test_another_major_version_or_none_is_refused_with_what_to_do(self, written: str | None, remedy: str) -> None:
        with pytest.raises(VersionError, match=r"x\.json: ") as caught:
            check_version("x.json", written, "1.1")
        assert str(caught.value.remedy).startswith(remedy)


class TestEvalFiles:
    def read(self, tmp_path: Path, head: Any) -> Any:
        (tmp_path / "e.yaml").write_text(head + EVAL)
        return load_eval(tmp_path / "e.yaml")

    @pytest.mark.parametrize("written", ['"1.0"', "'1.0'", "1.0"])
    def test_the_version_is_read_with_and_without_quotes(self, tmp_path: Path, written: str) -> None:
        spec = self.read(tmp_path, f"schemaVersion: {written}\n")
        assert spec.notices == ()
        assert spec.document.data["schemaVersion"] == written.strip("\"'")

    def test_a_bare_one_point_ten_would_be_one_point_one_and_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"e\.yaml:1: schemaVersion: without quotes this is the number 1\.1"):
            self.read(tmp_path, "schemaVersion: 1.10\n")
        assert "1.10 is newer" in self.read(tmp_path, 'schemaVersion: "1.10"\n').notices[0]

    @pytest.mark.parametrize("written", ["abc", "1", "[1, 0]", "null", "''"])
    def test_an_invalid_version_is_an_error_with_its_line(self, tmp_path: Path, written: str) -> None:
        with pytest.raises(ConfigError, match=r"e\.yaml:1: schemaVersion"):
            self.read(tmp_path, f"schemaVersion: {written}\n")

    def test_unknown_keys_of_a_newer_file_stay_errors_and_say_why(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as caught:
            self.read(tmp_path, 'schemaVersion: "1.7"\nshiny: 1\n')
        assert "e.yaml:2: shiny: unknown key" in str(caught.value)
        assert "version 1.7 is newer than this Holdfast" in str(caught.value) and "upgrade" in str(caught.value)
        with pytest.raises(ConfigError) as caught:
            self.read(tmp_path, 'schemaVersion: "1.0"\nshiny: 1\n')
        assert "than this Holdfast" not in str(caught.value)

    def test_a_file_without_a_version_is_of_the_current_one_and_gets_no_notice(self, tmp_path: Path) -> None:
        spec = self.read(tmp_path, "")
        assert spec.notices == () and spec.document.data["schemaVersion"] == SCHEMA_VERSION

    def test_the_notice_about_a_newer_minor_version_is_printed_once(self, tmp_path: Path) -> None:
        head, word = 'schemaVersion: "1.7"\n', "1.7 is newer"
        text = EVAL.replace("{model: m}", "{command: [echo, x]}") + "baseline: {command: [echo, y]}\n"
        (tmp_path / "e.yaml").write_text(head + text)
        for arguments in ([], ["--dry-run"], ["--display", "none"]):
            done = holdfast("eval", "e.yaml", *arguments, cwd=tmp_path)
            assert done.stderr.count(word) == 1, done.stderr
        shown = holdfast("eval", "e.yaml", "--fresh", "--display", "json", cwd=tmp_path).stderr
        assert word in "".join(event.get("message") or "" for event in map(json.loads, shown.splitlines()))

    def test_the_command_refuses_another_major(self, tmp_path: Path) -> None:
        (tmp_path / "e.yaml").write_text('schemaVersion: "2.0"\n' + EVAL)
        done = holdfast("eval", "e.yaml", cwd=tmp_path, check=2)
        assert "e.yaml:1: schemaVersion: this Holdfast reads version 1.0, not 2.0" in done.stderr
        assert "hint: Upgrade Holdfast" in done.stderr
        assert not (tmp_path / "runs").exists()

    def test_the_version_is_in_no_key_and_no_run_id(self, tmp_path: Path) -> None:
        text = EVAL.replace("{model: m}", "{command: [echo, x]}")
        keys = set()
        for number, written in enumerate(["", '"1.0"', '"1.9"']):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "e.yaml").write_text((f"schemaVersion: {written}\n" if written else "") + text)
            run = evaluate(folder / "e.yaml", runs_dir=folder / "runs").path
            grade = lines(run / "grades.jsonl")[0]
            keys.add((run.name, lines(run / "outputs.jsonl")[0]["key"], grade["key"], grade["grade_key"]))
        assert len(keys) == 1


class TestWhatIsWritten:
    def test_every_file_of_a_run_says_its_version(self, run: Any) -> None:
        for name in ("manifest.json", "results.json", "metrics.json"):
            assert json.loads((run / name).read_text())["schemaVersion"] == RUN_VERSION
        assert json.loads((run / "manifest.json").read_text())["eval"]["schemaVersion"] == SCHEMA_VERSION

    def test_the_first_event_the_copy_of_the_results_and_a_new_eval_have_their_versions(
        self, run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Events().begin("e", "t", "runs/e/t", Plan(1, 1, 0, 0, 1))
        assert json.loads(capsys.readouterr().err)["schemaVersion"] == RUN_VERSION
        holdfast("init", "new", cwd=tmp_path)
        assert load_eval(tmp_path / "new" / "eval.yaml").document.data["schemaVersion"] == SCHEMA_VERSION
        (tmp_path / "e.yaml").write_text(EVAL.replace("{model: m}", "{command: [echo, x]}"))
        holdfast("eval", "e.yaml", "--output-path", "out", cwd=tmp_path)
        (results,) = (tmp_path / "out").rglob("results_*.json")
        assert json.loads(results.read_text())["schemaVersion"] == RUN_VERSION


READERS = [["compare", "{run}", "{run}"], ["gate", "{run}", "--min", "correct=0"], ["export", "{run}", "--to", "csv"]]
READ = {
    "compare": ["metrics.json", "results.json"],
    "gate": ["manifest.json", "metrics.json", "results.json"],
    "export": ["manifest.json", "metrics.json"],
}


class TestRuns:
    @pytest.mark.parametrize(
        ("words", "name"),
        [(words, name) for words in READERS for name in READ[words[0]]],
        ids=lambda value: value if isinstance(value, str) else value[0],
    )
    @pytest.mark.parametrize("version", ["2.0", None])
    def test_every_reader_refuses_a_run_of_another_major_version_or_none(
        self, run: Any, tmp_path: Path, words: Any, name: Any, version: str | None
    ) -> None:
        say(run, version, name)
        done = holdfast(*(word.format(run=run) for word in words), cwd=tmp_path, check=2)
        assert f"{run / name}: " in done.stderr
        assert ("Restore the file" if version is None else "Upgrade Holdfast") in done.stderr

    @pytest.mark.parametrize("words", READERS, ids=lambda words: words[0])
    def test_every_reader_of_a_run_of_a_newer_minor_version_says_so(self, run: Any, tmp_path: Path, words: Any) -> None:
        say(run, "1.9", "manifest.json", "metrics.json", "results.json")
        done = holdfast(*(word.format(run=run) for word in words), cwd=tmp_path)
        named = words.count("{run}")
        assert done.stderr.count("version 1.9 is newer than this Holdfast") == named

    def test_grade_and_eval_refuse_a_run_of_another_major_version(
        self, run: Any, finished: Any, tmp_path: Path
    ) -> None:
        say(run, "2.0", "manifest.json")
        assert "not 2.0" in holdfast("grade", run, cwd=tmp_path, check=2).stderr
        for file in ("e.yaml", "agent.py"):
            shutil.copy(finished.parents[2] / file, tmp_path)
        (run / "metrics.json").unlink()
        before = (run / "manifest.json").read_bytes()
        assert "not 2.0" in holdfast("eval", "e.yaml", cwd=tmp_path, check=2).stderr
        assert (run / "manifest.json").read_bytes() == before

    def test_metrics_of_another_version_are_recomputed(self, run: Any, finished: Any, tmp_path: Path) -> None:
        for file in ("e.yaml", "agent.py"):
            shutil.copy(finished.parents[2] / file, tmp_path)
        say(run, "2.0", "metrics.json")
        holdfast("eval", "e.yaml", cwd=tmp_path)
        assert json.loads((run / "metrics.json").read_text())["schemaVersion"] == RUN_VERSION

    @pytest.mark.parametrize("version", ["2.0", None])
    def test_ls_calls_a_run_of_another_version_foreign_and_not_damaged(
        self, run: Any, tmp_path: Path, version: str | None
    ) -> None:
        say(run, version, "manifest.json")
        (listed,) = json.loads(holdfast("cache", "ls", "--status", "foreign", "--json", cwd=tmp_path).stdout)
        assert listed["path"] == str(run.relative_to(tmp_path))

    @pytest.mark.parametrize("version", [5, "new", ["1.0"]])
    def test_a_manifest_with_an_invalid_version_is_damaged(self, run: Any, tmp_path: Path, version: Any) -> None:
        say(run, version, "manifest.json")
        assert "holdfast repair" in holdfast("grade", run, cwd=tmp_path, check=2).stderr
