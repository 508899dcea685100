"""`holdfast cache`: the runs that are kept, listed, chosen and removed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.lab import Lab, rows, tree
from tests.support.running import (
    HOLDFAST,
    Server,
    environment,
    holdfast,
    metrics,
    module_server,
    server,
    start,
    wait_for,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COLUMNS = ["name", "target", "dataset", "status", "progress", "score", "size", "age", "id"]
DAY = 86400


provider = module_server()


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory, provider: Server) -> Path:
    """Two finished runs of different models and data, an unfinished one, and one with a damaged manifest."""
    folder = tmp_path_factory.mktemp("gallery")
    lab = Lab(folder, provider, rows=rows(6))
    lab.spec["target"]["model"] = "Qwen/Small-1"
    lab.eval()
    shutil.copy(folder / "data.jsonl", folder / "Other.jsonl")
    lab.eval("-m", "llama-2", "dataset.path=Other.jsonl", "name=second")
    lab.eval("-m", "llama-3", "--token-budget", 1, "--concurrency", 1, check=3)
    damaged = lab.eval("-m", "broken").run
    (damaged / "manifest.json").write_text("{")
    (damaged / "metrics.json").unlink()
    old = time.time() - 3 * DAY
    for path in folder.glob("runs/second/*/*"):
        os.utime(path, (old, old))
    return folder


@pytest.fixture
def copied(gallery: Path, tmp_path: Path) -> Path:
    """Copy the gallery for a test that removes runs."""
    shutil.copytree(gallery, tmp_path, dirs_exist_ok=True, copy_function=shutil.copy2)
    return tmp_path


def listed(cwd: Path, *options: Any) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(holdfast("cache", "ls", "--json", *options, cwd=cwd).stdout)
    return runs


def targets(cwd: Path, *options: Any) -> list[str]:
    return sorted(run["target"] for run in listed(cwd, *options))


def answering(answer: str, *arguments: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command, with somebody to answer its question."""
    return subprocess.run(
        [*HOLDFAST, *map(str, arguments)], cwd=cwd, env=environment(), input=answer, capture_output=True, text=True
    )


class TestListing:
    def test_dir_prints_the_runs_directory(self, gallery: Path) -> None:
        assert holdfast("cache", "dir", cwd=gallery).stdout == f"{gallery / 'runs'}\n"
        assert holdfast("cache", "dir", "--runs-dir", "x", cwd=gallery).stdout == f"{gallery / 'x'}\n"
        there = holdfast("cache", "dir", cwd=gallery, env={"HOLDFAST_RUNS_DIR": "/tmp/y"}).stdout
        assert there == "/tmp/y\n"

    def test_the_list_is_tab_separated_without_a_terminal(self, gallery: Path) -> None:
        head, *lines = [
            line.split("\t") for line in holdfast("cache", "ls", cwd=gallery).stdout.removesuffix("\n").split("\n")
        ]
        assert head == COLUMNS
        assert len(lines) == 4 and all(len(line) == len(COLUMNS) for line in lines)
        by_target = {line[1]: dict(zip(COLUMNS, line, strict=True)) for line in lines}
        finished = by_target["Qwen/Small-1"]
        assert (finished["status"], finished["progress"], finished["score"]) == ("finished", "6/6", "0.500")
        assert finished["dataset"] == "data.jsonl" and re.fullmatch(r"[0-9a-f]{8}", finished["id"])
        unfinished = by_target["llama-3"]
        assert (unfinished["status"], unfinished["progress"], unfinished["score"]) == ("unfinished", "1/6", "-")
        assert by_target["broken"]["status"] == "damaged"
        assert by_target["llama-2"]["age"] == "3d"

    def test_json_has_the_numbers_themselves(self, gallery: Path) -> None:
        run = next(run for run in listed(gallery) if run["target"] == "llama-2")
        path = gallery / run["path"]
        assert run["name"] == "second" and path.name.endswith(run["id"])
        assert (run["done"], run["total"], run["score"]) == (6, 6, metrics(path)["score"])
        assert run["size"] == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        assert time.time() - run["written"] == pytest.approx(3 * DAY, rel=0.1)

    @pytest.mark.parametrize(
        ("filters", "expected"),
        [
            (["--model", "LLAMA"], ["llama-2", "llama-3"]),
            (["--dataset", "OTHER"], ["llama-2"]),
            (["--status", "FINISHED"], ["Qwen/Small-1", "llama-2"]),
            (["--status", "damaged"], ["broken"]),
            (["--status", "unfinished", "--model", "llama"], ["llama-3"]),
            (["--older-than", "2d"], ["llama-2"]),
            (["--archived"], []),
        ],
        ids=" ".join,
    )
    def test_filters_combine_and_ignore_case(self, gallery: Path, filters: list[str], expected: list[str]) -> None:
        assert targets(gallery, *filters) == expected

    def test_an_invalid_age_is_refused(self, gallery: Path) -> None:
        stderr = holdfast("cache", "ls", "--older-than", "old", cwd=gallery, check=2).stderr
        assert "'old' is not an age such as" in stderr

    @pytest.mark.parametrize("option", ["--model", "--dataset", "--older-than"])
    def test_an_empty_filter_chooses_nothing(self, gallery: Path, option: str) -> None:
        for command in (["ls"], ["rm", "--status", "finished", "-y"]):
            stderr = holdfast("cache", *command, option, "", cwd=gallery, check=2).stderr
            assert f"{option} is empty" in stderr
        assert len(listed(gallery)) == 4

    def test_a_missing_runs_directory_is_reported(self, gallery: Path) -> None:
        stderr = holdfast("cache", "ls", "--runs-dir", "nowhere", cwd=gallery, check=2).stderr
        assert "nowhere is not a directory" in stderr

    def test_where_there_are_no_runs_there_is_nothing_to_list(self, tmp_path: Path) -> None:
        assert listed(tmp_path) == []
        assert holdfast("cache", "ls", cwd=tmp_path).stdout == "\t".join(COLUMNS) + "\n"
        assert list(tmp_path.iterdir()) == []

    def test_listing_writes_nothing(self, gallery: Path) -> None:
        before = tree(gallery)
        listed(gallery)
        assert tree(gallery) == before


class TestRemoving:
    def test_rm_shows_what_it_will_remove_and_asks(self, copied: Path) -> None:
        before = tree(copied)
        run = next(run for run in listed(copied) if run["target"] == "llama-2")
        asked = answering("n\n", "cache", "rm", run["id"], cwd=copied)
        assert asked.returncode == 0 and tree(copied) == before
        assert run["path"] in asked.stdout and "Remove 1 run?" in asked.stdout and "nothing was removed" in asked.stdout
        silent = answering("", "cache", "rm", run["id"], cwd=copied)
        assert silent.returncode == 2 and tree(copied) == before, "no answer is no yes"
        assert "not a terminal" in silent.stderr and "Use -y" in silent.stderr
        done = answering("y\n", "cache", "rm", run["id"], cwd=copied)
        assert done.returncode == 0 and not (copied / run["path"]).exists()
        assert list((copied / "runs" / "second").iterdir()) == [], "no part of it and no lock is left"
        assert len(listed(copied)) == 3

    def test_the_beginning_of_an_id_will_do_and_so_will_a_path(self, copied: Path) -> None:
        first, second = [run for run in listed(copied) if run["status"] == "finished"]
        holdfast("cache", "rm", "-y", first["id"][:6], second["path"], cwd=copied)
        assert targets(copied) == ["broken", "llama-3"]

    def test_naming_a_run_twice_removes_it_once(self, copied: Path) -> None:
        run = listed(copied)[0]
        done = holdfast("cache", "rm", "-y", run["id"], run["id"][:7], cwd=copied)
        assert "removed 1" in done.stdout and len(listed(copied)) == 3

    def test_filters_choose_what_goes(self, copied: Path) -> None:
        holdfast("cache", "rm", "-y", "--model", "LLAMA", "--status", "unfinished", cwd=copied)
        assert targets(copied) == ["Qwen/Small-1", "broken", "llama-2"]
        holdfast("cache", "rm", "-y", "--older-than", "1d", cwd=copied)
        assert targets(copied) == ["Qwen/Small-1", "broken"]
        holdfast("cache", "rm", "-y", "--status", "damaged", cwd=copied)
        assert targets(copied) == ["Qwen/Small-1"]

    def test_rm_removes_what_readers_published_about_a_run(self, copied: Path, tmp_path: Path) -> None:
        home = tmp_path / "home"
        env = environment(HOLDFAST_HOME=str(home), HOLDFAST_INDEX_BYTES="1")
        run = next(run for run in listed(copied) if run["target"] == "llama-2")
        holdfast("show", run["id"], "s0", cwd=copied, env=env)
        assert len(list((home / "index").iterdir())) == 1
        holdfast("cache", "rm", "-y", run["id"], cwd=copied, env=env)
        assert list((home / "index").iterdir()) == []

    def test_rm_all_removes_every_run(self, copied: Path) -> None:
        holdfast("cache", "rm", "-y", "--all", cwd=copied)
        assert listed(copied) == []
        assert [path for path in (copied / "runs").rglob("*") if not path.is_dir()] == []

    def test_a_folder_that_is_no_run_is_kept_even_if_it_contains_one(self, copied: Path) -> None:
        foreign = copied / "runs" / "web" / "app" / "dist" / "manifest.json"
        foreign.parent.mkdir(parents=True)
        foreign.write_text("{}")
        assert len(listed(copied)) == 4
        holdfast("cache", "rm", "-y", "--all", cwd=copied)
        assert foreign.exists() and listed(copied) == []

    @pytest.mark.parametrize("chosen", [["--all"], ["--status", "damaged"]], ids=" ".join)
    def test_a_folder_that_only_looks_like_a_run_is_removed_only_by_name(self, copied: Path, chosen: list[str]) -> None:
        foreign = copied / "runs" / "web" / "app"
        foreign.mkdir(parents=True)
        (foreign / "manifest.json").write_text('{"name": "a web app"}')
        (foreign / "outputs.jsonl").write_text('{"not": "sealed"}\n')
        holdfast("cache", "rm", "-y", *chosen, cwd=copied)
        assert foreign.exists() and "broken" not in targets(copied), "a damaged run with our outputs does go"
        holdfast("cache", "rm", "-y", foreign, cwd=copied)
        assert not foreign.exists()

    @pytest.mark.parametrize(
        "more",
        [["--older-than", "1d"], ["abcdef"]],
        ids=" ".join,
    )
    def test_all_with_a_filter_is_refused_with_a_hint(self, copied: Path, more: list[str]) -> None:
        before = tree(copied)
        stderr = holdfast("cache", "rm", "--all", "-y", *more, cwd=copied, check=2).stderr
        assert "Leave --all out" in stderr and tree(copied) == before

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [([], "name the runs to remove"), (["ffffffff"], "'ffffffff' is not a run"), ([""], "is not a run")],
    )
    def test_arguments_that_name_no_run_remove_nothing(self, copied: Path, arguments: list[str], message: str) -> None:
        before = tree(copied)
        assert message in holdfast("cache", "rm", "-y", *arguments, cwd=copied, check=2).stderr
        assert tree(copied) == before

    def test_filters_that_fit_nothing_remove_nothing(self, copied: Path) -> None:
        assert "no runs to remove" in holdfast("cache", "rm", "-y", "--model", "nobody", cwd=copied).stdout

    def test_an_archived_run_is_listed_and_removed_as_such(self, copied: Path) -> None:
        holdfast("eval", "e.yaml", "--fresh", cwd=copied)
        assert targets(copied, "--archived") == ["Qwen/Small-1"]
        assert len(listed(copied)) == 4, "it is not among the others"
        holdfast("cache", "rm", "-y", "--all", "--archived", cwd=copied)
        assert listed(copied, "--archived") == [] and len(listed(copied)) == 4
        assert list((copied / "runs" / "e" / "archived").iterdir()) == []


class TestALiveRun:
    @pytest.fixture
    def slow(self) -> Iterator[Server]:
        with server(fail={"hang": 1.0}) as running:
            yield running

    @pytest.fixture
    def live(self, tmp_path: Path, slow: Server) -> Iterator[subprocess.Popen[str]]:
        """A run in the middle of which an answer does not come."""
        lab = Lab(tmp_path, slow)
        lab.write()
        process = start("eval", "e.yaml", cwd=tmp_path)
        wait_for(lambda: slow.stats()["active"], "a request in flight")
        yield process
        if process.poll() is None:
            process.kill()
        process.communicate()

    def test_a_running_run_cannot_be_removed(self, tmp_path: Path, live: subprocess.Popen[str]) -> None:
        (run,) = listed(tmp_path)
        assert (run["status"], run["done"], run["total"]) == ("running", 0, 6)
        before = {name: content for name, (content, _) in tree(tmp_path / "runs").items() if "lock" not in name}
        for choice in ([run["id"]], ["--all"], ["--model", "test"]):
            refused = holdfast("cache", "rm", "-y", *choice, cwd=tmp_path, check=4)
            assert "not removed, in use" in refused.stderr and run["path"] in refused.stderr
        after = {name: content for name, (content, _) in tree(tmp_path / "runs").items() if "lock" not in name}
        assert after == before and live.poll() is None

    @pytest.mark.faults
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_a_run_whose_process_died_is_unfinished_and_removable(
        self, tmp_path: Path, live: subprocess.Popen[str], number: signal.Signals
    ) -> None:
        live.send_signal(number)
        live.wait(60)
        (run,) = listed(tmp_path)
        assert run["status"] == "unfinished"
        holdfast("cache", "rm", "-y", run["id"], cwd=tmp_path)
        assert listed(tmp_path) == []
        assert list((tmp_path / "runs" / "e").iterdir()) == []
