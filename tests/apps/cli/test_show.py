"""`holdfast show`: runs, failures and conversations in the terminal; and the last lines of a run with failures."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.lab import Lab, rows
from tests.support.running import HOLDFAST, Server, environment, holdfast, module_server, on_a_terminal, server
from tests.support.showcase import agent_run

if TYPE_CHECKING:
    from pathlib import Path

provider = module_server()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of an agent with checkpoints, tools, files and failed attempts, not finished."""
    return agent_run(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory, provider: Server) -> Lab:
    """A finished run of six samples with two trials each, of which every other sample fails."""
    lab = Lab(tmp_path_factory.mktemp("sums"), provider, rows=rows(6))
    lab.run = lab.eval("--trials", 2).run
    return lab


def show(run: Path, *arguments: str, check: int = 0) -> str:
    done = holdfast("show", run, *arguments, cwd=run.parent, check=check)
    return done.stdout if check == 0 else done.stderr


def on_screen(run: Path, *arguments: str, columns: int = 80, **env: Any) -> str:
    """Return what a terminal shows, without colours."""
    screen = on_a_terminal("show", run, *arguments, cwd=run.parent, columns=columns, LINES="500", **env)
    return re.sub(r"\x1b\[[0-9;]*m", "", screen).replace("\r\n", "\n")


class TestRun:
    def test_a_finished_run_is_its_numbers_and_then_its_failures(self, sums: Lab) -> None:
        shown = show(sums.run)
        assert "12 trials: 6 ✓ passed · 6 ✗ failed" in shown and str(sums.run) in shown
        assert re.search(r"│ correct │ 0\.500 │", shown)
        head, _, failures = shown.partition("✗ failed  s1/1")
        assert "✗ correct: expected" in failures and "✗ failed" not in head.partition("run: ")[2]
        assert failures.count("✗ failed") == 4 and "… and 1 trial more: holdfast show" in failures

    def test_failed_lists_all_of_them_and_n_the_first(self, sums: Lab) -> None:
        shown = show(sums.run, "--failed")
        assert shown.startswith("6 of 12 trials · e · test-model") and shown.count("✗ failed") == 6
        few = show(sums.run, "--failed", "-n", "2")
        assert few.count("✗ failed") == 2 and "… and 4 trials more\n" in few
        assert show(sums.run, "--errors").startswith("0 of 12 trials")

    def test_an_unfinished_run_is_shown_as_far_as_it_is(self, shop: Path) -> None:
        shown = show(shop)
        assert "not finished" in shown and "4 trials: 1 ✓ passed · 2 ✗ failed · 1 ! error" in shown
        assert re.search(r"│ checkpoint@1/knows +│ +2 │ +1 │", shown)
        errors = show(shop, "--errors")
        assert "! error  broken" in errors and "the agent has lost its notes" in errors and "milk" not in errors

    def test_a_grader_chooses_the_trials_that_it_did_not_pass(self, shop: Path) -> None:
        assert re.findall("✗ failed  (.+?)  ", show(shop, "--grader", "dear")) == ["milk"]
        assert re.findall("✗ failed  (.+?)  ", show(shop, "--grader", "checkpoint@1/knows")) == ["salt"]
        assert show(shop, "--grader", "polite", "--failed").startswith("0 of 4 trials")
        unknown = show(shop, "--grader", "deer", check=2)
        assert "no grader 'deer'" in unknown and "checkpoint@2/dear" in unknown

    def test_a_trial_whose_grader_broke_is_an_error(self, tmp_path: Path, provider: Server) -> None:
        with server(answer="judge") as judge:
            spec = {"type": "prompt", "name": "judge", "model": "j", "base_url": judge.base_url, "rubric": "Good?"}
            lab = Lab(tmp_path, provider, rows=rows(2), spec={"graders": [spec], "limits": {"retries": 0}})
            judge.control(status=500)
            done = lab.eval(check=3)
        assert "look: holdfast show" in done.out and "--errors, or holdfast view" in done.out
        shown = holdfast("show", done.run, "--errors", cwd=tmp_path).stdout
        assert shown.count("! error  s") == 2 and "! judge: " in shown

    def test_json_has_the_run_the_counts_and_whole_conversations(self, sums: Lab, shop: Path) -> None:
        data = json.loads(show(sums.run, "--json", "--failed", "-n", "1"))
        assert data["run"]["id"] == sums.run.name[-8:] and data["counts"] == {"passed": 6, "failed": 6}
        assert data["metrics"]["score"] == 0.5
        (trial,) = data["trials"]
        assert (trial["sample"], trial["trial"], trial["facts"]["status"]) == ("s1", 1, "failed")
        assert trial["graders"][0]["feedback"].startswith("expected")
        unfinished = json.loads(show(shop, "--json"))
        assert [trial["sample"] for trial in unfinished["trials"]] == ["milk", "salt", "broken"]
        assert unfinished["metrics"] is None and unfinished["run"]["status"] == "unfinished"

    def test_a_run_without_failures_says_so(self, tmp_path: Path, provider: Server) -> None:
        run = Lab(tmp_path, provider, rows=[{"id": "a", "question": "x", "expected": "x"}]).eval().run
        shown = show(run)
        assert "1 trial: 1 ✓ passed" in shown and "✗" not in shown and "holdfast show" not in shown


class TestConversation:
    def test_checkpoints_stand_between_the_turns_that_they_graded(self, shop: Path) -> None:
        shown = show(shop, "tea")
        places = [
            shown.index(part)
            for part in (
                "tea  ✓ passed  score 1.000",
                "You are the assistant of a small shop.",
                "── turn 1",
                "What does tea cost?",
                "━━ checkpoint after turn 1 · ✓ passed",
                "── turn 2",
                "! attempt 1 failed",
                "━━ checkpoint after turn 2 · ✓ passed",
                "── turn 3",
                "── graders",
                "✓ passed  polite  1.000",
                "── row",
                "category: drinks",
            )
        ]
        assert places == sorted(places)

    def test_tool_calls_have_their_results_and_files_what_became_of_them(self, shop: Path) -> None:
        shown = show(shop, "tea")
        assert '  ▸ price {"thing": "tea"}\n    ← {"thing": "tea", "price": 3}\n' in shown
        assert "+ bill.json  added" in shown and "- draft.txt  removed" in shown and "~ notes.md  changed" in shown
        assert "+- turn 2: tea costs 3" in shown

    def test_a_conversation_that_a_checkpoint_ended_shows_the_turns_that_were_never_asked(self, shop: Path) -> None:
        shown = show(shop, "salt")
        before, _, after = shown.partition("■ the conversation ended here")
        assert "━━ checkpoint after turn 1 · ✗ failed" in before and "contains 'do not know'" in before
        assert "── turn 2 · never asked" in after and "And the bill for one salt?" in after
        assert "checkpoint after turn 2 · ○ not reached" in after and "○ not reached  polite" in after

    def test_a_trial_without_an_output_shows_its_attempts(self, shop: Path) -> None:
        shown = show(shop, "broken")
        assert shown.count("failed after") == 2 and "ValueError: the agent has lost its notes" in shown
        assert "turn 1" not in shown, "the only turn needs no title"

    def test_a_judges_words_are_shown(self, tmp_path: Path, provider: Server) -> None:
        with server(answer="judge") as judge:
            spec = {"type": "prompt", "name": "judge", "model": "j-1", "base_url": judge.base_url, "rubric": "Good?"}
            run = Lab(tmp_path, provider, rows=rows(1), spec={"graders": [spec]}).eval().run
        shown = show(run, "s0")
        assert "✓ passed  judge  1.000  threshold 0.5 · j-1" in shown
        assert '{"reason": "as told", "score": 1}' in shown

    def test_json_is_a_list_of_the_trials(self, sums: Lab) -> None:
        both, one = (json.loads(show(sums.run, name, "--json")) for name in ("s1", "s1/2"))
        assert [trial["trial"] for trial in both] == [1, 2] and one == both[1:]


class TestNames:
    def test_the_beginning_of_a_sample_will_do_and_ids_may_have_slashes(
        self, tmp_path: Path, provider: Server, shop: Path
    ) -> None:
        assert show(shop, "mi").startswith("milk")
        ids = ["a/b", "a/b/2", "x y"]
        run = Lab(tmp_path, provider, rows=[{"id": each, "question": each, "expected": ""} for each in ids]).eval().run
        assert [show(run, name).partition("  ")[0] for name in ("a/b", "a/b/1", "a/b/2", "x")] == [
            "a/b",
            "a/b",
            "a/b/2",
            "x y",
        ]
        assert f"holdfast show {run} 'x y'" in show(run, "--failed")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("s", "'s' is ambiguous, it matches 6 samples: s0, s1, s2, s3, s4, s5"),
            ("t3", "no sample 't3'"),
            ("zzz", "There are: s0, s1"),
            ("s1/3", "no trial 3: the run has 2 per sample"),
            ("s1/0", "no trial 0"),
            ("", "no sample ''"),
        ],
    )
    def test_an_unknown_or_ambiguous_sample_is_refused_with_the_close_ones(
        self, sums: Lab, name: str, message: str
    ) -> None:
        assert message in show(sums.run, name, check=2)

    def test_an_unknown_run_is_refused_with_the_close_ones(self, sums: Lab) -> None:
        run_id = sums.run.name[-8:]
        wrong = run_id[:-1] + ("0" if run_id[-1] != "0" else "1")
        stderr = holdfast("show", wrong, cwd=sums.folder, check=2).stderr
        assert f"no run '{wrong}'" in stderr and f"Did you mean runs/e/{sums.run.name}?" in stderr

    def test_choices_of_trials_and_a_sample_exclude_each_other(self, sums: Lab) -> None:
        assert "are for a whole run" in show(sums.run, "s1", "--failed", check=2)


class TestTerminal:
    @pytest.mark.parametrize("columns", [60, 80, 140])
    def test_conversations_fit_the_width(self, shop: Path, columns: int) -> None:
        for sample in ("tea", "salt", "broken"):
            lines = on_screen(shop, sample, columns=columns).splitlines()
            assert max(map(len, lines)) <= columns
            rules = [line for line in lines if re.search("─{3,}$|━{3,}$", line)]
            assert rules and all(len(line) == columns for line in rules)

    def test_long_output_goes_through_the_pager_and_short_output_does_not(self, sums: Lab, shop: Path) -> None:
        pager: dict[str, Any] = {"PAGER": "sed s/^/paged:/"}
        long = on_a_terminal("show", shop, "tea", cwd=sums.folder, columns=80, LINES="20", **pager)
        assert all(line.startswith("paged:") for line in long.splitlines()) and "\x1b" not in long
        short = on_a_terminal("show", sums.run, "s1/1", cwd=sums.folder, columns=80, LINES="60", **pager)
        assert "paged:" not in short and "\x1b[" in short
        assert "paged:" not in show(shop, "tea")

    def test_a_long_text_is_cut_with_the_way_to_all_of_it(self, tmp_path: Path, provider: Server) -> None:
        row = {"id": "a", "question": "x" * 30_000, "expected": ""}
        run = Lab(tmp_path, provider, rows=[row]).eval().run
        assert "… 10,000 characters more; --json has all of it" in show(run, "a")
        assert len(json.loads(show(run, "a", "--json"))[0]["turns"][0]["messages"][0]["text"]) == 30_000


class TestEnd:
    """The lines that a run with failures ends with."""

    def test_the_end_of_a_run_names_a_failure_and_the_commands_that_show_it(self, sums: Lab) -> None:
        again = sums.eval("--trials", 2).out
        run_id = sums.run.name[-8:]
        assert "6 of 12 graded trials failed, for example:\n  s1 · correct: expected " in again
        assert f"look: holdfast show {run_id} --failed, or holdfast view {run_id}\n" in again

    def test_the_commands_name_a_run_that_is_elsewhere_by_its_path(self, tmp_path: Path, provider: Server) -> None:
        lab = Lab(tmp_path, provider, rows=rows(2))
        lab.write()
        ended = holdfast("eval", lab.eval_file.name, "--runs-dir", "my runs", cwd=tmp_path).stdout
        command = re.search(r"look: holdfast (show '.+?' --failed), ", ended)
        assert command is not None
        words = command[1].split("'")
        assert "✗ failed  s1" in holdfast("show", words[1], "--failed", cwd=tmp_path).stdout

    def test_an_unfinished_run_says_how_many_failed_so_far(self, shop: Path) -> None:
        (shop.parents[2] / "broken-1-1.txt").unlink(missing_ok=True)
        ended = holdfast("eval", "shop.yaml", cwd=shop.parents[2], check=3).stdout
        assert "2 of 3 graded trials failed\n" in ended and f"look: holdfast show {shop.name[-8:]} --failed" in ended

    def test_cells_of_a_suite_do_not_add_them(self, sums: Lab) -> None:
        ended = sums.eval("-m", "a", "-m", "b").out
        assert "look:" not in ended and "for example" not in ended


def test_a_closed_pipe_is_not_an_error_of_ours(shop: Path) -> None:
    command = f"{' '.join(HOLDFAST)} show {shop} tea | head -1"
    done = subprocess.run(
        ["bash", "-c", command], env=environment(), capture_output=True, text=True, cwd=os.fspath(shop)
    )
    assert done.stdout.startswith("tea") and "Traceback" not in done.stderr
