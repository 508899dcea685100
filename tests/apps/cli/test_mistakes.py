"""Mistakes that people make in files and on the command line: what they are told, with exit code 2 and nothing lost."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.running import HOLDFAST, environment, holdfast, lines, run_dir, server, write_eval
from tests.support.specs import command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.running import Server

NOBODY = "http://127.0.0.1:9/v1"


@pytest.fixture(scope="module")
def mock() -> Iterator[Server]:
    with server() as running:
        yield running


@pytest.fixture
def type_in(monkeypatch: Any, capsys: Any, tmp_path: Path) -> Any:
    for name in ("HOLDFAST_RUNS_DIR", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return lambda *words: command(monkeypatch, capsys, tmp_path, *words)


def refused(type_in: Any, *words: Any) -> str:
    ended = type_in(*words)
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err
    return str(ended.err)


# Which eval


def test_a_folder_stands_for_its_eval_file(type_in: Any, tmp_path: Path, mock: Server) -> None:
    write_eval(tmp_path, mock.base_url, rows=2, name="eval")
    assert type_in("eval", ".").code == 0
    assert type_in("eval").code == 0
    assert type_in("eval", "prompt={{ question }}?", "--dry-run").code == 0


def test_a_folder_without_an_eval_file_names_what_it_has(type_in: Any, tmp_path: Path) -> None:
    assert "holdfast init" in refused(type_in, "eval", ".")
    write_eval(tmp_path, NOBODY, name="sums")
    assert "sums.yaml" in refused(type_in, "eval", ".")
    assert "sums.yaml" in refused(type_in, "eval")


def test_a_dataset_is_not_an_eval_file(type_in: Any, tmp_path: Path) -> None:
    write_eval(tmp_path, NOBODY)
    message = refused(type_in, "eval", "data.jsonl")
    assert "is a dataset, not an eval file" in message and "dataset: {path: data.jsonl}" in message


# Budgets and lengths


def test_max_tokens_is_refused_with_both_meanings(type_in: Any, tmp_path: Path) -> None:
    path = write_eval(tmp_path, NOBODY)
    message = refused(type_in, "eval", path, "--max-tokens", "512")
    assert "target.params.max_tokens=512" in message and "--token-budget 512" in message
    message = refused(type_in, "eval", path, "limits.max_tokens=512")
    assert "target.params.max_tokens" in message and "limits.token_budget" in message


def test_a_resumed_run_keeps_its_budget_unless_it_is_given_another(type_in: Any, tmp_path: Path, mock: Server) -> None:
    path = write_eval(tmp_path, mock.base_url, rows=4, limits={"token_budget": 1, "concurrency": 1})
    assert type_in("eval", path).code == 3
    run = run_dir(tmp_path)
    assert type_in("resume", run).code == 3, "the budget holds"
    assert type_in("resume", run, "limits.token_budget=1000").code == 0
    assert len(lines(run / "outputs.jsonl")) == 4


def test_starting_from_scratch_leaves_nothing_to_retry(type_in: Any, tmp_path: Path) -> None:
    assert "--retry-failed" in refused(type_in, "eval", write_eval(tmp_path, NOBODY), "--fresh", "--retry-failed")


# Keys in the wrong place


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"model": "m", "temperature": 0}, "params: {temperature: …}"),
        ({"model": "m", "max_tokens": 20}, "params: {max_tokens: …}"),
        ({"model": "m", "url": "http://x"}, "did you mean 'base_url'?"),
        ({"model": "m", "modle": "x"}, "did you mean 'model'?"),
        ({"model": "m", "params": {"temperature": float("nan")}}, "target.params.temperature: NaN and infinity"),
        ({"model": "m", "params": {"n": 2}}, "target.params: `n` asks for several answers, of which one would count"),
        ({"model": "m", "params": {"best_of": 3}}, "`best_of` asks for several answers"),
        ({"model": "m", "params": {"generationConfig": {"candidateCount": 2}}}, "write `trials:` instead"),
    ],
)
def test_a_key_in_the_wrong_place_is_answered_with_the_right_one(
    type_in: Any, tmp_path: Path, target: dict[str, Any], message: str
) -> None:
    path = write_eval(tmp_path, NOBODY, target=target)
    path.write_text(path.read_text().replace("NaN", ".nan"))
    shown = refused(type_in, "eval", path)
    assert message in shown
    assert "known here" not in shown or "did you mean" not in shown


def test_all_problems_are_listed_at_once_in_the_order_of_their_lines(type_in: Any, tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(
        'schemaVersion: "1.0"\nname: e\nprompt: "{{ q"\ngraders:\n  - {type: exact, name: a, where: "q =="}\n'
        "target: {model: m, modle: 1}\n"
    )
    message = refused(type_in, "eval", "e.yaml")
    assert "give either `dataset` or `samples`" in message and "did you mean 'model'?" in message
    (tmp_path / "e.yaml").write_text(
        'schemaVersion: "1.0"\nname: e\nsamples: [{id: a}]\ntarget: {model: m}\n'
        'graders:\n  - {type: exact, name: a, where: "q =="}\nprompt: "{{ q"\n'
    )
    message = refused(type_in, "eval", "e.yaml")
    assert message.index("e.yaml:6") < message.index("e.yaml:7")


def test_a_text_on_the_command_line_needs_no_quotes_of_yaml(type_in: Any, tmp_path: Path, mock: Server) -> None:
    path = write_eval(tmp_path, mock.base_url, rows=1)
    assert type_in("eval", path, "system=Answer in the form: N", "target.params={seed: 1}").code == 0
    assert lines(run_dir(tmp_path) / "outputs.jsonl")[0]["messages"][0]["content"] == "Answer in the form: N"


# Data


def with_data(folder: Path, name: str, content: bytes, **block: Any) -> Path:
    path = write_eval(folder, NOBODY, dataset={"path": name, **block}, prompt="{{ q }}", graders=[])
    (folder / name).write_bytes(content)
    return path


def test_values_separated_by_semicolons_are_recognised(type_in: Any, tmp_path: Path) -> None:
    path = with_data(tmp_path, "d.csv", b"id;q\na;What?\n")
    message = refused(type_in, "eval", path, "-d")
    assert "d.csv:1" in message and """delimiter: ";\"""" in message
    assert type_in("eval", path, "-d", "dataset.delimiter=';'").code == 0


def test_a_declared_delimiter_is_not_doubted(type_in: Any, tmp_path: Path) -> None:
    path = with_data(tmp_path, "d.csv", b"q|r\nWhat?\n", delimiter=",")
    path.write_text(path.read_text().replace("{{ q }}", "x"))
    assert type_in("eval", path, "-d").code == 0


def test_lines_in_utf_16_are_read(type_in: Any, tmp_path: Path) -> None:
    path = with_data(tmp_path, "d.jsonl", '{"q": "Café?"}\n{"q": "Ja"}\n'.encode("utf-16"), encoding="utf-16")
    ended = type_in("eval", path, "-d")
    assert ended.code == 0 and "user: Café?" in ended.out


@pytest.mark.parametrize(("key", "value"), [("field", "rows"), ("delimiter", ";")])
def test_a_key_for_another_format_is_refused(type_in: Any, tmp_path: Path, key: str, value: str) -> None:
    path = with_data(tmp_path, "d.jsonl", b'{"q": "x"}\n', **{key: value})
    assert f"dataset.{key} is for" in refused(type_in, "eval", path, "-d")


@pytest.mark.parametrize("name", ["d.csv", "d.jsonl", "d.json"])
def test_another_encoding_is_named_and_can_be_declared(type_in: Any, tmp_path: Path, name: str) -> None:
    rows = {
        "d.csv": "id,q\na,plain\nb,Café?\n",
        "d.jsonl": '{"q": "plain"}\n{"q": "Café?"}\n',
        "d.json": '[{"q": "Café?"}]',
    }
    path = with_data(tmp_path, name, rows[name].encode("latin-1"))
    message = refused(type_in, "eval", path, "-d")
    assert "not UTF-8" in message and "dataset.encoding: latin-1" in message and "0xe9" in message
    if name != "d.json":
        assert f"{name}:" in message
    shown = type_in("eval", path, "-d", "--json", "dataset.encoding=latin-1")
    assert shown.code == 0 and "Unknown" not in shown.out
    assert "Check dataset.encoding" in refused(type_in, "eval", path, "-d", "dataset.encoding=klingon")


def test_rows_under_a_key_of_a_json_file_can_be_pointed_at(type_in: Any, tmp_path: Path) -> None:
    path = with_data(tmp_path, "d.json", b'{"version": 2, "data": {"rows": [{"q": "What?"}]}, "list": []}')
    assert "dataset.field: list" in refused(type_in, "eval", path, "-d")
    assert "has nothing at dataset.field" in refused(type_in, "eval", path, "-d", "dataset.field=rows")
    assert type_in("eval", path, "-d", "dataset.field=data.rows").code == 0


def test_a_filter_that_keeps_nothing_is_shown(type_in: Any, tmp_path: Path) -> None:
    path = with_data(tmp_path, "d.jsonl", b'{"q": 1}\n{"q": 2}\n', where="q == 3")
    assert "of 2 rows, none matches `where: q == 3`" in refused(type_in, "eval", path, "-d")


# Places


def test_a_file_in_place_of_the_runs_directory_is_wrong_usage(type_in: Any, tmp_path: Path) -> None:
    path = write_eval(tmp_path, NOBODY)
    assert "is a file" in refused(type_in, "eval", path, "--runs-dir", "data.jsonl")


# Before a run


def test_a_dry_run_shows_the_first_prompt_and_about_how_many_tokens(type_in: Any, tmp_path: Path) -> None:
    path = write_eval(
        tmp_path,
        NOBODY,
        rows=100,
        target={"model": "gpt-4o-mini", "base_url": NOBODY},
        system="You are terse.",
        prompt="Please: {{ question }}\nThanks.",
        follow_ups=["Sure?"],
    )
    ended = type_in("eval", path, "--dry-run", "--trials", "2")
    assert ended.code == 0
    assert "first sample: s0 (" in ended.out
    assert "  system: You are terse.\n  user: Please: question 0\n    Thanks.\n  user: Sure?" in ended.out
    planned = json.loads(type_in("eval", path, "--dry-run", "--json", "--trials", "2").out)["preview"]
    first_turn = len("You are terse." + "Please: question 10\nThanks.")
    letters = 2 * first_turn + len("Sure?")
    assert planned["tokens"] == pytest.approx(letters / 4 * 200, rel=0.05) and planned["trials"] == 200
    assert planned["cost"] == pytest.approx(planned["tokens"] * 0.15 / 1e6)
    assert f"about {planned['tokens']:,} tokens to send for 200 trials, about $" in ended.out
    assert f"gpt-4o-mini is asked at {NOBODY} by the chat API, up to 64 at once\n" in ended.out
    assert planned["replies"] is None and "without replies and judges\n" in ended.out
    assert (planned["requests"], planned["at_least"], planned["batching"]) == (400, False, None)


def test_a_dry_run_counts_replies_as_an_earlier_run_had_them(type_in: Any, tmp_path: Path, mock: Server) -> None:
    keys: dict[str, Any] = {"rows": 10, "prices": {"m": {"input": 1, "output": 1000}}}
    path = write_eval(tmp_path, mock.base_url, target={"model": "m", "base_url": mock.base_url}, **keys)
    assert type_in("eval", path, "--limit", "5").code == 0
    metrics = json.loads(next((tmp_path / "runs").glob("*/*/metrics.json")).read_text())
    ended = type_in("eval", path, "target.params.temperature=1", "--dry-run", "--json")
    planned = json.loads(ended.out)["preview"]
    mean = metrics["usage"]["output_tokens"] / 5
    assert planned["replies"] == round(mean * 10) and planned["replies_of"] == f"{metrics['run']} (m)"
    assert planned["cost"] == pytest.approx((planned["tokens"] + 1000 * planned["replies"]) / 1e6)
    shown = type_in("eval", path, "target.params.temperature=1", "--dry-run").out
    assert f"with {planned['replies']:,} tokens of replies as in run {metrics['run']} (m); without judges\n" in shown


def test_a_run_begins_with_an_estimate_of_its_cost(type_in: Any, tmp_path: Path, mock: Server) -> None:
    keys: dict[str, Any] = {"rows": 10, "prices": {"m": {"input": 1e4, "output": 1e4}}}
    path = write_eval(tmp_path, mock.base_url, target={"model": "m", "base_url": mock.base_url}, **keys)
    first = type_in("eval", path, "--limit", "5")
    assert re.search(r"^note: at least \$0\.\d+ for 5 trials; without replies and judges$", first.err, re.MULTILINE)
    run = json.loads(next((tmp_path / "runs").glob("*/*/metrics.json")).read_text())["run"]
    second = type_in("eval", path, "--workers", "1")
    assert re.search(rf"^note: about \$\S+ for 5 trials; with \d+ tokens of replies as in run {run} ", second.err, re.M)
    unpriced = type_in("eval", path, "-m", "n")
    assert unpriced.code == 0 and "trials; with" not in unpriced.err


def test_later_turns_are_estimated_with_the_replies_that_are_sent_again(
    type_in: Any, tmp_path: Path, mock: Server
) -> None:
    path = write_eval(tmp_path, mock.base_url, rows=4, follow_ups=["and then?", "why?"])
    assert type_in("eval", path).code == 0
    metrics = json.loads(next((tmp_path / "runs").glob("*/*/metrics.json")).read_text())
    planned = json.loads(type_in("eval", path, "-m", "n", "--dry-run", "--json").out)["preview"]
    written = 4 * sum(map(len, ["question 0"] * 3 + ["and then?"] * 2 + ["why?"])) / 4
    assert planned["tokens"] == pytest.approx(written + metrics["usage"]["output_tokens"], abs=2)
    assert planned["requests"] == metrics["usage"]["requests"] == 12


def test_a_model_with_tools_is_estimated_by_an_earlier_run(type_in: Any, tmp_path: Path, mock: Server) -> None:
    tool = {"name": "price", "parameters": {"type": "object"}, "responses": [{"result": 3}]}
    target = {"model": "m", "base_url": mock.base_url, "tools": [{"scripted": tool}]}
    path = write_eval(tmp_path, mock.base_url, rows=4, target=target, prices={"m": {"input": 1, "output": 1}})
    shown = type_in("eval", path, "--dry-run").out
    assert "without replies, further steps and judges\n" in shown
    assert type_in("eval", path, "--limit", "2").code == 0
    usage = json.loads(next((tmp_path / "runs").glob("*/*/metrics.json")).read_text())["usage"]
    planned = json.loads(type_in("eval", path, "target.params.seed=1", "--dry-run", "--json").out)["preview"]
    assert planned["tokens"] == 2 * usage["input_tokens"] and planned["requests"] == 2 * usage["requests"]
    assert not planned["at_least"]


def test_a_dry_run_refuses_a_budget_that_cannot_be_enforced(type_in: Any, tmp_path: Path) -> None:
    ended = type_in("eval", write_eval(tmp_path, NOBODY, rows=2), "--dry-run", "--max-cost", "1")
    assert ended.code == 2 and "max_cost cannot be enforced" in ended.err


def test_growing_a_limit_is_not_called_a_change_of_rows(type_in: Any, tmp_path: Path, mock: Server) -> None:
    path = write_eval(tmp_path, mock.base_url, rows=10)
    assert type_in("eval", path, "--limit", "5", "--token-budget", "1", "--concurrency", "1").code == 3
    assert "rows changed" not in type_in("eval", path, "--limit", "8", "--dry-run").out


def test_a_row_without_an_id_is_named_by_its_line(type_in: Any, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def reply(prompt):\n    assert prompt != 'bad', 'no'\n    return prompt\n")
    path = with_data(tmp_path, "d.jsonl", b'{"q": "good"}\n{"q": "bad"}\n', limit=2)
    spec = json.loads(path.read_text())
    path.write_text(json.dumps({**spec, "target": {"python": "agent.py:reply"}, "limits": {"retries": 0}}))
    ended = type_in("eval", path)
    assert ended.code == 3
    assert "(d.jsonl:2) #1: target: agent" in ended.err
    assert "(d.jsonl:2))" in ended.out, "in the summary too"


# Terminals


def test_an_ascii_only_terminal_gets_no_traceback(tmp_path: Path, mock: Server) -> None:
    path = write_eval(tmp_path, mock.base_url, rows=2)
    done = subprocess.run(
        [*HOLDFAST, "eval", str(path)],
        cwd=tmp_path,
        env=environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C"),
        capture_output=True,
    )
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    assert b"exact" in done.stdout and done.stdout.isascii()


def test_help_shows_options_in_groups_with_an_example(tmp_path: Path) -> None:
    stdout = holdfast("eval", "--help", cwd=tmp_path).stdout
    for title in ("What to run:", "How much, how fast:", "Earlier results and errors:", "Output:", "On a cluster:"):
        assert title in stdout
    assert "holdfast eval gsm8k.yaml --dry-run" in stdout and "--max-tokens" not in stdout
    assert "Other:" in stdout and stdout.index("Other:") > stdout.index("--help") - 200


def completions(folder: Path, line: str) -> list[str]:
    words = line.split(" ")
    env = environment(_HOLDFAST_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
    script = "import sys; sys.argv = ['holdfast']; from holdfast.apps.cli.main import main; main()"
    done = subprocess.run([HOLDFAST[0], "-c", script], cwd=folder, env=env, capture_output=True, text=True)
    return done.stdout.split()


def test_the_shell_completes_files_run_ids_and_profiles(type_in: Any, tmp_path: Path, mock: Server) -> None:
    type_in("eval", write_eval(tmp_path, mock.base_url, rows=1))
    (tmp_path / "env.toml").write_text('[cluster]\nexecutor = "local"\n[wandb]\nproject = "x"\n')
    run = run_dir(tmp_path).name.rpartition("-")[2]
    assert completions(tmp_path, f"holdfast export {run[:3]}") == [f"plain,{run}"]
    assert completions(tmp_path, f"holdfast show {run} s") == ["plain,s0"]
    assert completions(tmp_path, "holdfast eval e.y") == ["file,e.y"]
    assert completions(tmp_path, "holdfast export ru") == ["file,ru"], "a path where no id fits"
    assert completions(tmp_path, "holdfast doctor c") == ["plain,cluster"]
    assert completions(tmp_path, "holdfast eval e.yaml --run cl") == ["plain,cluster"]
