"""A report looks up and counts many trials at a time, and equals one that is made trial by trial."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from msgspec import UNSET

from holdfast.canonical import digest
from holdfast.errors import Fault
from holdfast.graders.build import grader_places
from holdfast.plan.identity import identify, new_manifest
from holdfast.plan.keys import generation_digests, generation_key
from holdfast.report.metrics import report_so_far, write_report
from holdfast.report.stats import quantile
from holdfast.report.tally import Row, RowsTally
from holdfast.report.trials import Judged, JudgedOutput, UsageTally, judge_output, measured_graders
from holdfast.spec.load import load_eval
from holdfast.store.heads import VerdictRef, read_output, ref_of
from holdfast.store.metrics import Results
from holdfast.store.records import ANSWER_CLASSES, SCHEMA_VERSION, Grade, Mark, Output, Timing, Usage, to_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from holdfast.plan.identity import RunIdentity
    from holdfast.store.records import GradeStatus
    from holdfast.store.rundir import RunDir

ROWS = 40
SCORES = (None, 0.0, -0.0, 1.0, 0.5, 0.3, 1 / 3)
LEVELS = ("easy", "hard")
STATUSES: tuple[GradeStatus, ...] = ("passed", "failed", "error", "skipped")
USAGES = (
    Usage(5, 7, 1, 0.1),
    Usage(5, 7, 2, 1e-9),
    Usage(5, 7, 1, 0.3, cache_read_tokens=2),
    Usage(1 << 40, 3, 1, 0.7),
)

CHAT: dict[str, Any] = {"model": "m", "base_url": "http://127.0.0.1:9/v1"}
EXACT: dict[str, Any] = {"type": "exact", "name": "exact", "threshold": 0.4}
HARD: dict[str, Any] = {"type": "text", "name": "hard", "contains": ["x"], "where": 'level == "hard"', "weight": 2}
JUDGES = {"type": "prompt", "name": "judges", "prompt": "Rate {{ output }}", "model": ["one", "two"]}
EVALS: dict[str, dict[str, Any]] = {
    "one grader": {"graders": [EXACT]},
    "no grader": {"graders": []},
    "several graders and fields": {
        "graders": [EXACT, HARD, {**EXACT, "name": "free", "weight": 0}],
        "by": ["level", "n"],
    },
    "graders of some rows": {"graders": [HARD, {**HARD, "name": "easy", "where": 'level == "easy"'}], "by": ["level"]},
    "sums over the run": {"graders": [{"type": "bleu", "name": "bleu"}, EXACT]},
    "several trials": {"graders": [EXACT, HARD], "trials": 3, "by": ["level"]},
    "clusters": {"graders": [EXACT], "cluster": "n", "by": ["level"]},
    "several judges": {"graders": [JUDGES, EXACT]},
    "a limit on time": {"graders": [{"type": "behavior", "name": "quick", "max_duration_ms": 5000}]},
    "a checkpoint": {
        "graders": [EXACT],
        "checkpoints": [{"after_turn": 1, "on_failure": "stop", "graders": [{**EXACT, "name": "polite"}]}],
        "follow_ups": ["and?"],
    },
    "values in requests": {
        "graders": [EXACT],
        "target": {"http": "http://127.0.0.1:9", "request": {"n": "{{ n }}"}, "response": "answer"},
    },
}


class Finished(NamedTuple):
    """A run without a process."""

    identity: RunIdentity
    rundir: RunDir


def write_run(folder: Path, keys: dict[str, Any], seed: int) -> Finished:
    """Write a run of which some outputs and grades are missing, in an order that is not quite the dataset's."""
    with (folder / "data.jsonl").open("w") as file:
        for number in range(ROWS):
            row = {
                "id": f"s{number}",
                "q": "é",
                "expected": "x",
                "level": LEVELS[number % 2],
                "n": number % 5 or "none",
            }
            file.write(json.dumps(row) + "\n")
    spec = {"name": "e", "dataset": {"path": "data.jsonl"}, "target": CHAT, "prompt": "{{ q }}", **keys}
    (folder / "e.yaml").write_text(json.dumps(spec))
    identity = identify(load_eval(folder / "e.yaml"))
    rundir = identity.directory(folder / "runs")
    rundir.write_manifest(new_manifest(identity))
    rng = Random(seed)
    order = [(position, trial) for position in range(ROWS) for trial in range(1, identity.spec.trials + 1)]
    order.sort(key=lambda each: each[0] + rng.random() * 6)
    usages = USAGES if seed % 2 else (*USAGES, Usage(None, 3, 1, None))
    for position, trial in order:
        if rng.random() < 0.9:
            output = make_output(identity, position, trial, usages, rng)
            folder = rundir.path if rng.random() < 0.7 else rundir.path / "workers" / "a"
            append(folder / "outputs.jsonl", to_line(output))
            append(
                folder / "grades.jsonl", b"".join(map(to_line, make_grades(identity, position, output, usages, rng)))
            )
    return Finished(identity, rundir)


def append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)


def make_output(identity: RunIdentity, position: int, trial: int, usages: Sequence[Usage], rng: Random) -> Output:
    survey, usage = identity.survey, rng.choice(usages)
    asked, row = "sha256:" + survey.asked_at(position).hex(), survey.row_text(position)
    text = rng.choice(["yes", 'say "no"\n\t\\', "über\x00\x7f \U0001f600", "x" * rng.randrange(20_000)])
    messages = [{"role": "assistant", "content": text}]
    return Output(
        key=identity.work.key(asked, trial),
        sample=f"s{position}",
        trial=trial,
        attempt=1,
        messages=messages,
        output=text,
        turns=1,
        stop="stop",
        answer=rng.choice(ANSWER_CLASSES),
        usage=usage,
        timing=Timing(1e9 + position, rng.random() * 9),
        digest="not a digest" if rng.random() < 0.02 else digest([messages, position]),
        marks=[Mark(1, digest([position]), usage=usage, seconds=0.5)] if rng.random() < 0.5 else UNSET,
        row=row if survey.asked else UNSET,
    )


def make_grades(
    identity: RunIdentity, position: int, output: Output, usages: Sequence[Usage], rng: Random
) -> Iterator[Grade]:
    panel = identity.survey.panels.panel_at(position)
    for number in panel.graders:
        slot, block = identity.work.slots[number], grader_places(identity.spec)[number].block
        key = identity.work.verdict_key(ref_of(output), number)
        if key is not None:
            score, status = rng.choice(SCORES), rng.choice(STATUSES)
            yield Grade(
                key=output.key,
                sample=output.sample,
                trial=output.trial,
                grader="any",
                type=block.type,
                by=slot.fingerprint,
                turn=slot.turn,
                judged=digest("something else") if rng.random() < 0.07 else key[2],
                status=status,
                score=None if status in ("error", "skipped") else score,
                weight=1.0,
                feedback="",
                details=None,
                seconds=0.1,
                usage=rng.choice((None, *usages)),
                time=1e9,
                counts=(rng.randrange(9), 9, *[3] * 8) if block.type == "bleu" else UNSET,
            )


class Numbers(NamedTuple):
    """Results and numbers that were computed trial by trial."""

    results: bytes
    whole: RowsTally
    by: dict[str, dict[str, RowsTally]]
    answers: Counter[str]
    usage: Usage
    judge_usage: Usage
    seconds: float


def numbers_of(identity: RunIdentity, rundir: RunDir) -> Numbers:
    """Compute a report trial by trial, from what every reader of a run uses."""
    index, survey, spec = rundir.load(repair=False), identity.survey, identity.spec
    places, groupings = grader_places(spec), survey.groupings
    whole = RowsTally(places, spec.trials)
    by = {name: {value: RowsTally(places, spec.trials) for value in groupings[name].values} for name in spec.by}
    measured = measured_graders(identity.work, places, index)
    usage, judges, seconds = UsageTally(), UsageTally(), []
    entries, answers = [], Counter[str]()
    for position in range(survey.count):
        values = {name: groupings[name].values[groupings[name].number_at(position)] for name in groupings}
        panel, judged, outputs = survey.panels.panel_at(position), [], 0
        for trial in range(1, spec.trials + 1):
            key = identity.work.key("sha256:" + survey.asked_at(position).hex(), trial)
            ref, each = index.output(key), JudgedOutput({}, "error", None)
            if ref is not None:
                outputs += 1
                usage.add(ref.usage)
                seconds.append(ref.seconds)
                recorded = identity.work.verdicts(ref, index.verdicts(key), panel)
                each = judge_output(identity.work, places, recorded, panel, measured)
            verdicts = {number: verdict for number, verdict in each.verdicts.items() if verdict is not None}
            for verdict in verdicts.values():
                if verdict.recorded is not None and verdict.recorded.usage is not None:
                    judges.add(verdict.recorded.usage)
            judged.append(each)
            entry = {
                "sample": survey.ids[position],
                "trial": trial,
                "key": key,
                "status": each.status,
                "score": each.score,
                "answer": None if ref is None else read_output(ref).answer,
                "output": None if ref is None else read_output(ref).output,
                "grades": {places[n].name: {"status": v.status, "score": v.score} for n, v in verdicts.items()},
            }
            if spec.by:
                entry["by"] = {name: values[name] for name in spec.by}
            if spec.cluster is not None:
                entry["cluster"] = values[spec.cluster]
            entries.append(msgspec.json.encode(entry))
            answers[entry["answer"] or "errors"] += 1
        cluster = None if spec.cluster is None else groupings[spec.cluster].number_at(position)
        row = Row(panel, judged, outputs, cluster)
        for tally in [whole, *[by[name][values[name]] for name in spec.by]]:
            tally.add(row)
    head = msgspec.json.encode({"schemaVersion": SCHEMA_VERSION, "run": identity.id, "eval": spec.name})
    return Numbers(
        head[:-1] + b',"trials":[\n' + b",\n".join(entries) + b"\n]}\n",
        whole,
        by,
        answers,
        usage.summary(),
        judges.summary(),
        quantile(sorted(seconds), 0.5),
    )


LIMITS = (
    {},
    {"trials._BATCH": 7, "trials._MOST_JUDGED": 4, "tally._MOST_MEANS": 2},
    {"trials._BATCH": 16, "trials._BATCH_BYTES": 1 << 14, "metrics._MOST_EQUAL": 4, "tally._MOST_MEANS": 2},
    {"trials._BATCH_BYTES": 1, "metrics._MOST_EQUAL": 0, "trials._GAP": 0},
)


@pytest.mark.parametrize("seed", range(len(LIMITS)))
@pytest.mark.parametrize("keys", EVALS.values(), ids=EVALS)
def test_a_report_equals_one_that_is_made_trial_by_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], seed: int
) -> None:
    for name, limit in LIMITS[seed].items():
        monkeypatch.setattr(f"holdfast.report.{name}", limit)
    identity, rundir = write_run(tmp_path, keys, seed)
    expected = numbers_of(identity, rundir)
    report = write_report(identity, rundir, rundir.load(repair=False))
    assert rundir.results.read_bytes() == expected.results
    so_far = report_so_far(identity, rundir.load(repair=False))
    whole, places = expected.whole, grader_places(identity.spec)
    for computed, unfinished in ((report, False), (so_far, True)):
        assert list(computed.graders) == [place.name for place in places]
        for number, block in enumerate(computed.graders.values()):
            assert block.to_dict().items() >= whole.grader_metrics(number, so_far=unfinished).to_dict().items()
        assert computed.by == {
            name: {value: tally.value_metrics(so_far=unfinished) for value, tally in tallies.items()}
            for name, tallies in expected.by.items()
        }
        assert (computed.usage, computed.judge_usage) == (expected.usage, expected.judge_usage)
        assert computed.timing.trial_seconds_p50 == pytest.approx(expected.seconds)
    assert report.overall == (whole.overall_metrics(so_far=False) if places else None)
    for number, block in enumerate(so_far.graders.values()):
        assert block.ungraded == whole.looked_at[number] - whole.decided(number)
    for block in [*report.graders.values(), *([report.overall] if report.overall else [])]:
        assert block.passed + block.failed + block.skipped + block.errors == report.total
    answers = report.to_dict()["answers"]
    assert sum(answers.values()) == report.total == so_far.answers.total
    assert {name: count for name, count in answers.items() if count} == expected.answers
    decoded = msgspec.json.decode(rundir.results.read_bytes(), type=Results)
    assert report.outputs == sum(trial.output is not None for trial in decoded.trials)
    assert report.graded == sum(trial.status in ("passed", "failed") for trial in decoded.trials)


def test_a_damaged_output_stops_the_report_and_is_named(tmp_path: Path) -> None:
    identity, rundir = write_run(tmp_path, EVALS["one grader"], 1)
    index = rundir.load(repair=False)
    path = rundir.path / "outputs.jsonl"
    content = path.read_bytes()
    start = content.index(b"\n", len(content) // 2) + 1
    place = content.index(b'"role"', start)
    path.write_bytes(content[:place] + b'"rule"' + content[place + 6 :])
    with pytest.raises(Fault, match=f"a damaged line at byte {start}"):
        write_report(identity, rundir, index)
    assert not rundir.results.exists()


def test_equal_rows_count_as_often_as_they_are_added(tmp_path: Path) -> None:
    identity, _ = write_run(tmp_path, EVALS["sums over the run"], 1)
    places, panel = grader_places(identity.spec), identity.survey.panels.panel_at(0)

    def row(*counts: int) -> Row:
        bleu = Judged("passed", 0.5, VerdictRef("passed", 0.5, None, counts=counts))
        return Row(panel, [JudgedOutput({0: bleu, 1: Judged("failed", 0.0)}, "failed", 0.25)], 1)

    near, far = row(8, 6, 4, 2, 9, 8, 7, 6, 9, 9), row(1, 1, 1, 1, 9, 8, 7, 6, 9, 12)
    together, apart = RowsTally(places, 1), RowsTally(places, 1)
    together.add(near, 3)
    together.add(far)
    for each in (near, near, near, far):
        apart.add(each)
    assert together.value_metrics(so_far=False) == apart.value_metrics(so_far=False)
    assert together.looked_at == apart.looked_at == [4, 4]


def test_keys_of_many_trials_are_those_of_each() -> None:
    digests = [digest([number]) for number in range(5)]
    raw = [bytes.fromhex(text[7:]) for text in digests]
    work = digest("work")
    expected = [generation_key(sample, trial, work) for sample in digests for trial in (1, 2, 3)]
    assert ["sha256:" + key.hex() for key in generation_digests(b"".join(raw), 3, work)] == expected
