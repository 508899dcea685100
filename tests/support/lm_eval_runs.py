"""Results of lm-eval itself, from a process of its own, and the comparison of a run with them, to the last digit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from holdfast.data.readers import Layout, read_rows
from holdfast.plugins.benchmarks.names import OVERLAY
from tests.support.forking import OFFLINE, Forked, start_warm_process
from tests.support.running import ROOT, environment, lines


def evaluate_with_lm_eval(place: Path, base_url: str, tasks: list[Any], **options: Any) -> Any:
    """Evaluate `tasks` on the data under `place`/hub; see `lm_eval_oracle` for the tasks and the options."""
    request = {"base_url": base_url, "hub": str(place / "hub"), "tasks": tasks, "limit": None, "include": str(OVERLAY)}
    start_warm_process()  # whose folder holds what lm-eval's packages make of data
    process = Forked(
        [sys.executable, "-m", "tests.support.lm_eval_oracle"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**OFFLINE),
    )
    with process:
        results, errors = process.communicate(json.dumps({**request, **options}))
    assert process.returncode == 0, errors[-3000:]
    return json.loads(results)


def assert_equal_to_lm_eval(run: Path, theirs: dict[str, Any], *, limit: int) -> None:
    """Compare everything in a run of `limit` documents of each subtask with what `evaluate_with_lm_eval` returned."""
    rows, manifest = _compiled_rows(run), json.loads((run / "manifest.json").read_text())["eval"]
    outputs = {line["sample"]: line for line in lines(run / "outputs.jsonl") if "sample" in line}
    trials = {line["sample"]: line for line in json.loads((run / "results.json").read_text())["trials"]}
    tasks = manifest["metadata"]["benchmark"]["tasks"]
    assert set(tasks) == set(theirs["samples"])
    assert len(trials) == limit * len(tasks)
    compared = 0
    for task, samples in theirs["samples"].items():
        for sample in samples:
            identifier = f"{task}/{sample['doc_id']}"
            asked = list(sample["arguments"].values()) if isinstance(sample["arguments"], dict) else sample["arguments"]
            asked = [list(each.values()) if isinstance(each, dict) else list(each) for each in asked]
            message = outputs[identifier]["messages"][-1]
            if "continuations" in rows[identifier]:
                assert _arguments(rows[identifier], {}) == asked
                ours = [[each["logprob"], each["greedy"]] for each in message["likelihoods"]]
                responses = [response[0] for response in sample["resps"]]
                assert [[float(value), greedy in (True, "True")] for value, greedy in responses] == ours
            else:
                params = {**manifest["target"]["params"]}
                assert _arguments(rows[identifier], params) == [[asked[0][0], _generation(asked[0][1])]]
                assert message["content"] == sample["resps"][0][0]
            for metric in tasks[task]["metrics"]:
                if metric["filter"] == sample["filter"]:
                    assert trials[identifier]["grades"][metric["grader"]]["score"] == sample[metric["metric"]]
                    compared += 1
    assert compared >= len(trials)
    groups = manifest["metadata"]["benchmark"]["groups"]
    assert set(groups) | set(tasks) == set(theirs["results"])
    numbers = json.loads((run / "metrics.json").read_text())["benchmark"]["results"]
    for task, values in theirs["results"].items():
        reported = {key: value for key, value in values.items() if isinstance(value, float)}
        assert reported and reported == {key: numbers[task].get(key) for key in reported}


def _compiled_rows(run: Path) -> dict[str, dict[str, Any]]:
    [path] = json.loads((run / "manifest.json").read_text())["dataset"]["source"]
    return {row["id"]: row for _, row in read_rows(Path(path), Layout())}


def _arguments(row: dict[str, Any], params: dict[str, Any]) -> list[list[Any]]:
    """The requests of a row, as lm-eval lists their arguments."""
    if "continuations" not in row:
        return [[row["context"], params]]
    pairs = [
        {"context": row["context"], "text": each} if isinstance(each, str) else each for each in row["continuations"]
    ]
    return [[pair["context"], pair["text"]] for pair in pairs]


def _generation(options: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's options of a generation as parameters of a request."""
    sent = {key: value for key, value in options.items() if key not in ("until", "do_sample", "max_gen_toks")}
    return {**sent, "stop": options["until"], "max_tokens": options.get("max_gen_toks", 256), "seed": 1234}
