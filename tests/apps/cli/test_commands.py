"""The command line: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import __version__
from holdfast.apps.cli.main import _VERBS
from holdfast.spec.load import load_eval
from tests.support.running import HOME, environment, holdfast, lines, metrics, run_dir, server, write_eval
from tests.support.specs import command, write_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ESCAPE = re.compile("\x1b")


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Type a command in a fresh folder."""
    for name in ("HOLDFAST_RUNS_DIR", "HOLDFAST_LOCK_TIMEOUT", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return lambda *words: command(monkeypatch, capsys, tmp_path, *words)


@pytest.fixture(scope="module")
def mock() -> Iterator[Any]:
    with server() as running:
        yield running


def everything(folder: Path) -> Any:
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


def watched(folder: Path, *words: Any) -> Any:
    """Return the modules that a command imports, the files that it opens and the folders that it lists."""
    script = (
        "import json, sys\n"
        "from holdfast.apps.cli.main import main\n"
        "sys.argv = ['holdfast', *sys.argv[1:]]\n"
        "seen = {'open': [], 'os.scandir': []}\n"
        "sys.addaudithook(lambda event, given: event in seen and seen[event].append(str(given[0])))\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(json.dumps({'imported': list(sys.modules), 'opened': seen['open'], 'listed': seen['os.scandir']}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=folder, env=environment()
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def many_runs(tmp_path: Path) -> Path:
    """A folder of 205 runs, more than are read each time, of one eval, written a while ago."""
    write_spec(tmp_path, target={"mock": "waza"})
    holdfast("eval", "eval.yaml", cwd=tmp_path)
    run = run_dir(tmp_path, "e")
    for number in range(204):
        shutil.copytree(run, run.with_name(f"copy-{number:08}"))
    for path in run.parent.rglob("*"):
        os.utime(path, (1e9, 1e9))
    return run.parent


class TestManyRuns:
    def test_a_run_is_read_again_by_ls_only_if_its_files_look_different(self, tmp_path: Path, many_runs: Path) -> None:
        def read() -> set[str]:
            opened = watched(tmp_path, "ls")["opened"]
            return {path.rpartition("/")[0].rpartition("/")[2] for path in opened if path.endswith("metrics.json")}

        assert len(read()) == 205
        assert read() == set()
        with (many_runs / "copy-00000007" / "run.log").open("a") as log:
            log.write("more\n")
        assert read() == {"copy-00000007"}
        (many_runs / "copy-00000008" / "metrics.json").unlink()
        listed = holdfast("ls", cwd=tmp_path).stdout
        assert listed.count("finished") == 205 and listed.count("unfinished") == 1  # the word is in both

    def test_the_folders_of_runs_that_look_the_same_are_not_even_listed(self, tmp_path: Path, many_runs: Path) -> None:
        first, again = (watched(tmp_path, "ls") for _ in range(2))
        assert {f"runs/e/copy-{number:08}" for number in range(204)} < set(first["listed"])
        assert [path for path in again["listed"] if path.startswith("runs")] == ["runs", "runs/e"]
        assert "pydantic" not in again["imported"]

    def test_a_change_inside_a_run_is_noticed(self, tmp_path: Path, many_runs: Path) -> None:
        holdfast("ls", cwd=tmp_path)
        run = many_runs / "copy-00000003"
        (run / "workers" / "w").mkdir(parents=True)
        (run / "workers" / "w" / "outputs.jsonl").write_bytes((run / "outputs.jsonl").read_bytes())
        os.truncate(many_runs / "copy-00000005" / "outputs.jsonl", 10)
        os.utime(many_runs / "copy-00000005" / "outputs.jsonl", (1e9, 1e9))
        replaced = many_runs / "copy-00000006"
        (replaced / "metrics.json").replace(replaced / "old.json")
        (replaced / "old.json").rename(replaced / "metrics.json")
        for name, text in (("metrics.json", "damaged"), ("new.json", "{}")):
            (replaced / name).write_text(text)
        listed = {run["path"]: run for run in json.loads(holdfast("ls", "--json", cwd=tmp_path).stdout)}
        statuses = {path.rpartition("/")[2]: each["status"] for path, each in listed.items()}
        assert statuses["copy-00000005"] == "damaged" and statuses["copy-00000006"] == "unfinished"
        assert listed[f"runs/e/{run.name}"]["size"] > listed["runs/e/copy-00000004"]["size"]
        with (run / "workers" / "w" / "outputs.jsonl").open("ab") as file:
            file.write(b"more")
        again = {run["path"]: run for run in json.loads(holdfast("ls", "--json", cwd=tmp_path).stdout)}
        assert again[f"runs/e/{run.name}"]["size"] == listed[f"runs/e/{run.name}"]["size"] + 4

    def test_a_damaged_cache_is_made_again(self, tmp_path: Path, many_runs: Path) -> None:
        listed = [holdfast("ls", "--json", cwd=tmp_path).stdout]
        cache = HOME / "home.db"
        assert b"finished" in cache.read_bytes()
        cache.write_bytes(cache.read_bytes().replace(b"finished", b"mutilate"))
        listed += [holdfast("ls", "--json", cwd=tmp_path).stdout for _ in range(2)]
        assert len(set(listed)) == 1

    def test_eval_examines_only_runs_that_can_lend_and_the_nearest_ones(self, tmp_path: Path, many_runs: Path) -> None:
        def read(prompt: str) -> list[str]:
            write_spec(tmp_path, target={"mock": "waza"}, prompt=prompt)
            opened = watched(tmp_path, "eval", "eval.yaml", "--dry-run")["opened"]
            earlier = {path.name for path in many_runs.iterdir() if path.is_dir()}
            return [path for path in opened if earlier & {*path.split("/")}]

        first, again = read("{{ question }} A"), read("{{ question }} B")
        assert all(path.endswith("manifest.json") for path in (*first, *again))
        assert len(first) == 205 + 50  # once to know them, and the nearest to explain what has changed
        assert len(again) == 50


class TestItself:
    def test_version_is_printed(self, tmp_path: Path) -> None:
        assert holdfast("--version", cwd=tmp_path).stdout == f"holdfast {__version__}\n"

    @pytest.mark.parametrize("words", [["--version"], ["--help"]])
    def test_version_and_help_import_nothing_heavy(self, tmp_path: Path, words: Any) -> None:
        imported = {name.partition(".")[0] for name in watched(tmp_path, *words)["imported"]}
        assert "click" in imported and "holdfast" in imported
        heavy = {
            "aiohttp",
            "pydantic",
            "rich",
            "jinja2",
            "msgspec",
            "ruamel",
            "uvloop",
            "zstandard",
            "asyncio",
            "jmespath",
        }
        assert imported & heavy == set()

    def test_an_eval_reads_its_file_once_and_imports_only_what_it_uses(self, tmp_path: Path) -> None:
        write_spec(tmp_path, target={"mock": "waza"})
        seen = watched(tmp_path, "eval", "eval.yaml")
        assert metrics(run_dir(tmp_path, "e"))["outputs"] == 2
        assert [path for path in seen["opened"] if path.endswith("eval.yaml")] == ["eval.yaml"]
        imported = set(seen["imported"])
        assert "holdfast.engine" in imported
        others = {"aiohttp", "datasets", "holdfast.apps.cluster", "holdfast.plugins.waza.read", "mlflow", "wandb"}
        assert imported & others == set()

    @pytest.mark.parametrize(("length", "reads"), [(10, 1), (3 << 20, 3)], ids=["small", "large"])
    def test_a_small_dataset_is_read_once_and_a_large_one_to_digest_it_to_survey_it_and_to_run_it(
        self, tmp_path: Path, length: int, reads: int
    ) -> None:
        rows = [{"id": name, "question": name * length, "expected": name} for name in ("a", "b")]
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        dataset = {"path": "rows.jsonl"}
        write_spec(tmp_path, target={"mock": "waza"}, samples=None, dataset=dataset, prompt="{{ id }}")
        for expected in (reads, 1):  # the second command finds the run finished
            opened = watched(tmp_path, "eval", "eval.yaml")["opened"]
            assert sum(path.endswith("rows.jsonl") for path in opened) == expected
        assert metrics(run_dir(tmp_path, "e"))["outputs"] == 2

    @pytest.mark.parametrize("words", [["eval", "--help"], ["eval", "--trials", "0"]])
    def test_help_and_refused_options_of_eval_import_no_schemas(self, tmp_path: Path, words: Any) -> None:
        imported = set(watched(tmp_path, *words)["imported"])
        assert "holdfast.apps.cli.eval" in imported
        assert imported & {"aiohttp", "asyncio", "jinja2", "pydantic", "rich", "ruamel.yaml"} == set()

    def test_a_run_begins_without_what_other_evals_need(self, tmp_path: Path, mock: Any) -> None:
        (tmp_path / "checks.py").write_text(
            "import json, pathlib, sys\n"
            "def note(output):\n"
            "    pathlib.Path('modules.json').write_text(json.dumps(list(sys.modules)))\n"
            "    return 1\n"
        )
        note = {"type": "python", "function": "checks.py:note"}
        write_spec(tmp_path, target={"model": "m", "base_url": mock.base_url}, graders=[note])
        opened = watched(tmp_path, "eval", "eval.yaml")["opened"]
        assert metrics(run_dir(tmp_path, "e"))["outputs"] == 2
        imported = set(json.loads((tmp_path / "modules.json").read_text()))
        assert {"holdfast.http.connections", "holdfast.graders.python"} <= imported
        unused = {"holdfast.plugins.benchmarks", "holdfast.formats"}
        unused |= {"aiohttp", "email", "importlib.metadata", "jinja2", "urllib.request"}
        unused |= {"holdfast.graders.files", "holdfast.spec.suite", "holdfast.targets.tools"}
        unused |= {"holdfast.engine.hooks"}
        unused |= {"holdfast.engine.workspace", "holdfast.targets.embedded", "holdfast.targets.likelihood"}
        unused |= {"holdfast.plugins.batches"}
        assert imported & unused == set()
        assert [path for path in opened if path.endswith("entry_points.txt")] == []  # of all installed packages

    def test_the_first_request_is_sent_before_all_trials_of_the_window_are_prepared(
        self, tmp_path: Path, mock: Any
    ) -> None:
        samples = [{"id": f"s{number}"} for number in range(64)]
        target = {"model": "m", "base_url": mock.base_url}
        write_spec(tmp_path, target=target, samples=samples, prompt="{{ id }}", graders=None)
        script = (
            "import sys\n"
            "from holdfast.apps.cli.main import main\n"
            "from holdfast.http.connections import Connections\n"
            "make_request, write_soon, prepared = Connections.request, Connections.write_soon, []\n"
            "def count(*arguments, **options):\n"
            "    prepared.append(1)\n"
            "    return make_request(*arguments, **options)\n"
            "def note_count(*arguments):\n"
            "    open('prepared.txt', 'a').write(f'{len(prepared)}\\n')\n"
            "    write_soon(*arguments)\n"
            "Connections.request, Connections.write_soon = count, note_count\n"
            "sys.argv = ['holdfast', 'eval', 'eval.yaml', '--concurrency', '64', '--display', 'none']\n"
            "main()\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, env=environment())
        counts = [int(line) for line in (tmp_path / "prepared.txt").read_text().splitlines()]
        assert len(counts) == 64
        assert counts[0] < 32

    @pytest.mark.parametrize("words", [["--help"], ["-h"]])
    def test_help_lists_every_verb(self, type_in: Any, words: Any) -> None:
        ended = type_in(*words)
        assert ended.code == 0
        for verb, summary in _VERBS.items():
            assert re.search(rf"^\s+{verb}\s+{re.escape(summary[:30])}", ended.out, re.MULTILINE)

    @pytest.mark.parametrize("verb", _VERBS)
    def test_every_verb_has_help(self, type_in: Any, verb: Any) -> None:
        ended = type_in(verb, "--help")
        assert ended.code == 0 and re.search(rf"^Usage: .*{verb}", ended.out) and "--help" in ended.out

    def test_wrong_usage_is_an_error_with_a_hint_after_the_usage(self, type_in: Any) -> None:
        usage, *message = type_in("gate", "--nonsense").err.splitlines()
        assert re.match(r"Usage: .*gate", usage)
        assert re.fullmatch(r"error: No such option.*--nonsense.*", message[0])
        assert re.fullmatch(r"hint: \S* ?gate --help lists all options\.", message[1]) and len(message) == 2
        message = type_in("nonsense").err.splitlines()[1:]
        assert message[0].startswith("error: No such command") and message[1].endswith("--help lists all commands.")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["evall", "x"], "Did you mean 'eval'?"),
            (["inti"], "Did you mean 'init'?"),
            (["nonsense"], "No such command 'nonsense'"),
            (["eval"], "name an eval file"),
            (["eval", "e.yaml", "--trails", "3"], "--trials"),
            (["eval", "e.yaml", "--trials", "0"], "--trials"),
            (["eval", "e.yaml", "--concurrency", "0"], "neither a number above 0 nor auto"),
            (["eval", "e.yaml", "--max-time", "soon"], "not a duration"),
            (["eval", "e.yaml", "--display", "loud"], "--display"),
            (["eval", "e.yaml", "not-an-eval"], "no eval file 'not-an-eval'"),
            (["eval", "e.yaml", "=1"], "is not an override"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_wrong_usage_is_exit_code_two_with_what_is_right(
        self, type_in: Any, tmp_path: Path, words: Any, message: str
    ) -> None:
        write_spec(tmp_path).rename(tmp_path / "e.yaml")
        before = everything(tmp_path)
        ended = type_in(*words)
        assert ended.code == 2 and message in ended.err
        assert "Traceback" not in ended.err and everything(tmp_path) == before

    def test_a_bad_lock_timeout_is_named(self, type_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_spec(tmp_path)
        monkeypatch.setenv("HOLDFAST_LOCK_TIMEOUT", "soon")
        ended = type_in("eval", "eval.yaml")
        assert ended.code == 2 and "invalid HOLDFAST_LOCK_TIMEOUT 'soon'" in ended.err


class TestEval:
    def test_a_run_prints_its_numbers_and_its_path_and_the_same_command_makes_no_request(
        self, type_in: Any, tmp_path: Path, mock: Any
    ) -> None:
        path = write_eval(tmp_path, mock.base_url, rows=10)
        before = mock.requests
        ended = type_in("eval", path)
        assert ended.code == 0 and mock.requests == before + 10
        run = run_dir(tmp_path)
        assert f"run: {run.relative_to(tmp_path)}" in ended.out
        assert "coverage 100.0% of 10 trials" in ended.out and "0.500" in ended.out and "0.237 – 0.763" in ended.out
        assert "cost unknown" in ended.out and "30 tokens" in ended.out
        again = type_in("eval", path)
        assert again.code == 0 and "already finished" in again.out and mock.requests == before + 10
        assert "0.237 – 0.763" in again.out

    @pytest.mark.parametrize(
        ("words", "look"),
        [
            (["-m", "other"], lambda report: report["target"] == "other"),
            (["--model", "other"], lambda report: report["target"] == "other"),
            (["--trials", "2"], lambda report: report["total"] == 8),
            (["--limit", "3"], lambda report: report["total"] == 3),
            (["dataset.limit=1", "--limit", "3"], lambda report: report["total"] == 1),
            (["--concurrency", "1"], lambda report: report["total"] == 4),
            (["--concurrency", "auto"], lambda report: report["total"] == 4),
            (["name=other"], lambda report: report["eval"] == "other"),
            (["graders.exact.threshold=0"], lambda report: report["passed"] == 1),
            (["--token-budget", "1000", "--max-time", "1h"], lambda report: report["coverage"] == 1),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_options_and_overrides_take_effect(
        self, type_in: Any, tmp_path: Path, mock: Any, words: Any, look: Any
    ) -> None:
        path = write_eval(tmp_path, mock.base_url, rows=4)
        assert type_in("eval", path, *words).code == 0
        (report,) = tmp_path.glob("runs/*/*/metrics.json")
        assert look(json.loads(report.read_text()))

    @pytest.mark.parametrize("limit", [["--limit", "1"], ["dataset.limit=1"]], ids=" ".join)
    def test_a_limit_holds_for_rows_written_by_hand_too(
        self, type_in: Any, tmp_path: Path, mock: Any, limit: Any
    ) -> None:
        path = write_spec(tmp_path, target={"model": "m", "base_url": mock.base_url})
        assert type_in("eval", path, *limit).code == 0
        assert metrics(run_dir(tmp_path))["total"] == 1

    @pytest.mark.parametrize("limit", ["many", "0", "-1", "1.5", ""])
    def test_an_invalid_limit_is_refused(self, type_in: Any, tmp_path: Path, limit: str) -> None:
        ended = type_in("eval", write_spec(tmp_path), f"dataset.limit={limit}")
        assert ended.code == 2 and "limit" in ended.err and "Traceback" not in ended.err

    @pytest.mark.parametrize("option", ["--fresh", "--force"])
    def test_the_command_that_resumes_does_not_start_from_scratch(
        self, type_in: Any, tmp_path: Path, mock: Any, option: str
    ) -> None:
        path = write_eval(tmp_path, mock.base_url, rows=3)
        ended = type_in("eval", path, option, "--token-budget", "1", "--concurrency", "1")
        assert ended.code == 3
        again = next(line for line in ended.out.splitlines() if line.strip().startswith("holdfast eval"))
        assert option not in again and str(path) in again and "--token-budget" in again

    def test_graders_can_be_skipped_and_run_later(self, type_in: Any, tmp_path: Path, mock: Any) -> None:
        path = write_eval(tmp_path, mock.base_url, rows=3)
        before = mock.requests
        first = type_in("eval", path, "--skip-graders")
        assert first.code == 0 and "without --skip-graders" in first.out
        run = run_dir(tmp_path)
        assert not (run / "metrics.json").exists() and len(lines(run / "outputs.jsonl")) == 3
        assert type_in("eval", path).code == 0
        assert metrics(run)["graded"] == 3 and mock.requests == before + 3

    def test_runs_go_to_the_runs_directory(
        self, type_in: Any, tmp_path: Path, mock: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_eval(tmp_path, mock.base_url, rows=1)
        monkeypatch.setenv("HOLDFAST_RUNS_DIR", "from-environment")
        assert type_in("eval", path).code == 0
        assert type_in("eval", path, "--runs-dir", "from-option").code == 0
        assert not (tmp_path / "runs").exists()
        assert [
            len(list((tmp_path / name).glob("e/*/metrics.json"))) for name in ("from-environment", "from-option")
        ] == [1, 1]

    def test_the_printed_resume_command_works_as_typed(self, type_in: Any, tmp_path: Path) -> None:
        path = write_eval(tmp_path, "http://127.0.0.1:9/v1", rows=2)
        words = ["eval", str(path), "target.params={stop: ['[/b]', ':smile:']}", "system=it's [bold]x[/bold]"]
        ended = type_in(*words)
        assert ended.code == 3 and "refuses connections" in ended.out
        (printed,) = [line for line in ended.out.splitlines() if line.startswith("  holdfast ")]
        assert shlex.split(printed) == ["holdfast", *words]

    @pytest.mark.parametrize("name", ["[red]x[/red]", "a:smile:b", "[/x]"])
    def test_names_are_printed_as_they_are(self, type_in: Any, tmp_path: Path, mock: Any, name: str) -> None:
        path = write_eval(tmp_path, mock.base_url, rows=1, graders=[{"type": "exact", "name": name}])
        ended = type_in("eval", path, f"target.model='{name}'")
        assert ended.code == 0
        assert ended.out.count(name) == 2, "in the title and in the table"


class TestInit:
    @pytest.mark.parametrize("folder", [None, "new", "deep/er"])
    def test_init_writes_an_eval_that_can_be_read(self, type_in: Any, tmp_path: Path, folder: str | None) -> None:
        ended = type_in("init", *([folder] if folder else []))
        assert ended.code == 0
        path = tmp_path / (folder or ".") / "eval.yaml"
        spec = load_eval(path)
        assert spec.name == "first-steps"
        assert (path.parent / "questions.jsonl").read_text().count("\n") == 5
        (printed,) = [line for line in ended.out.splitlines() if line.startswith("Run it with:")]
        assert type_in(*shlex.split(printed.removeprefix("Run it with:"))[1:], "--dry-run").code == 0

    @pytest.mark.parametrize("name", ["eval.yaml", "questions.jsonl"])
    def test_nothing_is_overwritten(self, type_in: Any, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text("mine")
        ended = type_in("init")
        assert ended.code == 2 and f"{name} is already there" in ended.err
        assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "mine"

    @pytest.mark.parametrize("folder", ["file", "file/inner"])
    def test_init_refuses_a_file_in_place_of_a_folder(self, type_in: Any, tmp_path: Path, folder: str) -> None:
        (tmp_path / "file").write_text("mine")
        ended = type_in("init", folder)
        assert ended.code == 2 and "Traceback" not in ended.err and ended.err


class TestRepair:
    @pytest.mark.parametrize("place", [".", "nowhere", "e.yaml"])
    def test_a_folder_that_is_no_run_is_refused(self, type_in: Any, tmp_path: Path, place: str) -> None:
        (tmp_path / "e.yaml").touch()
        ended = type_in("repair", place)
        assert ended.code == 2 and "Traceback" not in ended.err


class TestDisplays:
    @pytest.mark.parametrize("display", ["plain", "json", "none", "rich", None])
    def test_escape_codes_go_only_to_terminals(self, tmp_path: Path, mock: Any, display: str | None) -> None:
        path = write_eval(tmp_path, mock.base_url, rows=5, gate={"exact": 1})
        words = ["--display", display] if display else []
        done = holdfast("eval", path, *words, cwd=tmp_path, check=1, env={"TERM": "xterm-256color"})
        assert not ESCAPE.search(done.stdout)
        if display != "rich":
            assert not ESCAPE.search(done.stderr)
        assert "0.600" in done.stdout and "gate not met" in done.stdout

    def test_display_none_shows_nothing_during_a_run(self, type_in: Any, tmp_path: Path, mock: Any) -> None:
        assert type_in("eval", write_eval(tmp_path, mock.base_url, rows=2), "--display", "none").err == ""

    def test_display_plain_shows_the_plan(self, type_in: Any, tmp_path: Path, mock: Any) -> None:
        lines = type_in("eval", write_eval(tmp_path, mock.base_url, rows=2), "--display", "plain").err.splitlines()
        assert lines[0].startswith("e · test-model · runs/e/test-model-")
        assert lines[1] == "2 trials of 2 samples: 2 to run"

    def test_errors_and_notices_are_events_too(self, type_in: Any, tmp_path: Path, mock: Any) -> None:
        path = write_eval(
            tmp_path, mock.base_url, rows=1, graders=[{"type": "number", "expected": "{{ question.split()[0] }}"}]
        )
        first = [json.loads(line) for line in type_in("eval", path, "--display", "json").err.splitlines()]
        assert [event["status"] for event in first if event["event"] == "grade"] == ["error"]
        again = [json.loads(line) for line in type_in("eval", path, "--fresh", "--display", "json").err.splitlines()]
        assert "the earlier run was archived to" in next(
            event["message"] for event in again if event["event"] == "notice"
        )
