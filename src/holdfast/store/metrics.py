"""`metrics.json` and `results.json`: the results of a finished run, as a whole and trial by trial."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from holdfast.store.records import ANSWER_CLASSES, SCHEMA_VERSION, AnswerClass, GradeStatus, Usage, class_of_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Answers(Struct, frozen=True, kw_only=True):
    """Number of trials by the class of their answer. The counts add up to the number of trials."""

    whole: int = 0
    """the target ended its answer itself"""
    cut: int = 0
    """the token limit, the context window or `max_steps` ended it"""
    filtered: int = 0
    """the provider's filter removed it, or a part of it"""
    refused: int = 0
    """the model refused to answer, and the API says so"""
    empty: int = 0
    """the answer ended normally and has no content"""
    paused: int = 0
    """the provider paused the answer and did not continue it"""
    limited: int = 0
    """a limit of the trial ended it: time, tokens, cost or calls"""
    exited: int = 0
    """the target's program ended with an exit code other than 0"""
    errors: int = 0
    """trials without an output"""
    pending: int = 0
    """trials that were not attempted yet, or are uncertain; only while a run is not finished"""

    @property
    def outputs(self) -> int:
        """Number of answers."""
        return self.total - self.errors - self.pending

    @property
    def total(self) -> int:
        """Number of trials."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


def count_answers(kinds: Mapping[str, int], *, errors: int, pending: int = 0) -> Answers:
    """Sum counts of kinds by class."""
    counts = dict.fromkeys(ANSWER_CLASSES, 0)
    for kind, count in kinds.items():
        counts[class_of_kind(kind)] += count
    return Answers(**counts, errors=errors, pending=pending)


class Rule(NamedTuple):
    """Threshold and weight of a grader. Rules are part of no key, so a report stores its own."""

    threshold: float | None
    weight: float
    combine: str | None = None
    """how the votes of several judges are combined"""


class Agreement(Struct, frozen=True, kw_only=True):
    """How far several judges agree."""

    alpha: float | None
    """Krippendorff's alpha of their scores: 1 is full agreement, 0 is chance; null if all scores are the same"""
    equal: float
    """share of the outputs on which all of them pass, or all fail"""
    outputs: int
    """number of outputs with at least two scores"""


class GraderMetrics(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Statistics over the verdicts of one grader, or over the trials as a whole."""

    score: float | None
    """mean over the samples of the mean over their trials"""
    low: float | None
    """lower end of the 95 % interval"""
    high: float | None
    """upper end of the 95 % interval"""
    stderr: float | None
    """standard error"""
    interval: str
    """method of the interval, described below; `none` without an interval"""
    n: int
    """number of verdicts with a score"""
    passed: int
    """number of verdicts that pass"""
    failed: int
    """number of verdicts that fail"""
    skipped: int
    """number of trials without a verdict and without an error; `passed`, `failed`, `skipped` and `errors` add up to the
    number of trials"""
    errors: int
    """number of trials without a verdict because of an error of the target or the grader"""
    not_reached: int = 0
    """of `skipped`: conversations that ended before the checkpoint, or that a checkpoint ended; left out if 0"""
    not_asked: int = 0
    """of `skipped`: trials of rows that the grader's `where` excludes; left out if 0"""
    measure: bool = False
    """true if the grader records measurements without verdicts; left out otherwise"""
    pass_at: dict[int, float] = {}
    """probability that at least one of k trials passes"""
    pass_all: dict[int, float] = {}
    """probability that all of k trials pass, with several trials"""
    pass_n: dict[int, int] = {}
    """with several trials: by k, the number of samples that `pass@k` and `pass^k` are means over: those with at least k
    verdicts"""
    totals: dict[str, float] = {}
    """only for [text metrics](graders-text.md#text-metrics): the number for the whole run; and `measured`, how many
    values are measurements, of graders that may give values that are no scores"""
    set_score: float | None = None
    """only for graders that look at all outputs together: their own number for all of them"""
    rows: int | None = None
    """number of rows that the grader applies to, if it has a `where`"""
    ungraded: int | None = None
    """number of outputs without a verdict; only while a run is not finished"""
    threshold: float | None = None
    """threshold in the eval; null means that the grader itself decides"""
    weight: float | None = None
    """weight in the eval"""
    combine: str | None = None
    """only for several judges: how their votes are combined in the eval"""
    agreement: Agreement | None = None
    """only for several judges: how far they agree: `alpha`, Krippendorff's alpha of their scores, or null if all scores
    are the same; `equal`, the share of the outputs on which all pass or all fail; and the number of `outputs`"""

    @property
    def left_out(self) -> int:
        """Number of trials that the grader skipped or was not asked about, other than checkpoints not reached."""
        return 0 if self.measure else self.skipped - self.not_reached

    @property
    def declined(self) -> int:
        """Number of outputs that the grader itself skipped."""
        return 0 if self.measure else self.skipped - self.not_reached - self.not_asked

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GraderMetrics:
        """Read the block of `metrics.json`; raise msgspec's ValidationError if it is damaged."""
        fields = {name: data[name] for name in cls.__struct_fields__ if name in data and name != "totals"}
        others = {name: value for name, value in data.items() if name not in fields and isinstance(value, int | float)}
        if "pass_n" in fields:
            fields["pass_n"] = {int(k): n for k, n in msgspec.convert(fields["pass_n"], dict[str, int]).items()}
        shares = {
            key: {int(name[5:]): others.pop(name) for name in list(others) if name.removeprefix(mark).isdigit()}
            for key, mark in _FLATTENED.items()
        }
        return msgspec.convert({**fields, **shares, "totals": others}, cls)

    def to_dict(self) -> dict[str, Any]:
        """Return the block of `metrics.json`."""
        data: dict[str, Any] = {}
        for name, value in msgspec.to_builtins(self).items():  # without fields that have their default
            if name in _FLATTENED:
                data |= {f"{_FLATTENED[name]}{k}": share for k, share in value.items()}
            elif name == "totals":
                data |= value
            elif name not in ("threshold", "weight"):
                data[name] = value
        return data if self.weight is None else {**data, "threshold": self.threshold, "weight": self.weight}


_FLATTENED: Final = {"pass_at": "pass@", "pass_all": "pass^"}
"""fields of GraderMetrics that are stored as several numbers, with the prefix of each k"""


class ValueMetrics(Struct, frozen=True, kw_only=True):
    """Statistics over the rows that have one value in a field."""

    samples: int
    graders: dict[str, GraderMetrics] = field(name="metrics")
    """graders that apply to some of these rows; without thresholds and weights, which belong to the whole run"""
    overall: GraderMetrics | None
    """of the trials as a whole; None without graders"""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ValueMetrics:
        """Read the block of `metrics.json`; raise msgspec's ValidationError if it is damaged."""
        return msgspec.convert({**data, **_read_blocks(data)}, cls)

    def to_dict(self) -> dict[str, Any]:
        """Return the block of `metrics.json`."""
        return {"samples": self.samples, **_written_blocks(self.graders, self.overall)}


class BenchmarkMetrics(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The numbers of a benchmark in lm-eval's words, computed with lm-eval's arithmetic."""

    results: dict[str, dict[str, Any]]
    """by task and group: `name`, `alias`, `sample_len`, and each metric's `METRIC,FILTER` and `METRIC_stderr,FILTER`"""
    groups: dict[str, dict[str, Any]] = {}
    """the results of groups that average over their tasks"""
    group_subtasks: dict[str, list[str]] = {}
    versions: dict[str, Any] = {}
    n_shot: dict[str, int] = field(name="n-shot", default={})
    higher_is_better: dict[str, dict[str, bool | None]] = {}
    n_samples: dict[str, dict[str, int]] = field(name="n-samples", default={})
    """by task: `original`, the rows of the whole task, and `effective`, the rows with a score"""


class RunTiming(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything in `metrics.json` that depends on the clock."""

    finished: str
    """when the report was written"""
    seconds: float
    """time with trials or grades in flight, over all processes"""
    trial_seconds_p50: float | None
    """median duration of a trial"""
    trial_seconds_p95: float | None
    """duration that 95 % of the trials stay below"""
    outputs_bytes: int | None = None
    """size of the outputs that the report was made of; if the journals are smaller now, lines are missing"""
    grades_bytes: int | None = None
    """size of the grades that the report was made of"""


class Metrics(Struct, frozen=True, kw_only=True):
    """The numbers of a run: the content of `metrics.json`."""

    schema_version: str = field(name="schemaVersion", default=SCHEMA_VERSION)
    """version of the file, MAJOR.MINOR"""
    run: str
    """id of the run"""
    eval: str
    """name of the eval"""
    target: str
    """name of the target"""
    samples: int
    """number of samples"""
    trials: int
    """number of trials per sample"""
    total: int
    """samples × trials"""
    outputs: int
    """number of outputs"""
    answers: Answers
    """number of trials by the class of their answer: `whole`, `cut`, `filtered`, `refused`, `empty`, `paused`,
    `limited`, `exited`, and `errors` for trials without an output. They add up to `total`"""
    graded: int
    """number of trials that passed or failed"""
    coverage: float
    """share of the trials on which every grader that was asked gave a verdict; a skip is not a verdict"""
    score: float | None
    """mean over the samples of the mean over their trials, of the weighted mean over the graders"""
    passed: float | None
    """mean over the samples of the share of their trials that pass every grader of a weight above 0"""
    graders: dict[str, GraderMetrics] = field(name="metrics")
    """statistics by grader, described below"""
    overall: GraderMetrics | None
    """statistics of the trials as a whole; null without graders"""
    by: dict[str, dict[str, ValueMetrics]] = {}
    """only with [`by`](eval-file.md#by): by field and value, `samples`, `metrics` and `overall` of the rows with this
    value, in the dataset's order"""
    cluster: str | None = None
    """only with [`cluster`](eval-file.md#cluster): the field whose values group the samples for intervals"""
    benchmark: BenchmarkMetrics | None = None
    """only for benchmarks: their [numbers](#numbers-of-benchmarks) as lm-eval reports them"""
    notices: list[str] = []
    """only if there are any: answers that are not whole, and graders that skipped outputs or checked nothing"""
    usage: Usage
    """tokens, requests and cost of the outputs"""
    judge_usage: Usage
    """tokens, requests and cost of the judges"""
    timing: RunTiming
    """last, and the only part that depends on the clock"""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Metrics:
        """Read the content of `metrics.json`; raise msgspec's ValidationError if it is damaged."""
        values = msgspec.convert(data.get("by", {}), dict[str, dict[str, dict[str, Any]]])
        by = {
            name: {value: ValueMetrics.from_dict(block) for value, block in blocks.items()}
            for name, blocks in values.items()
        }
        return msgspec.convert({**data, **_read_blocks(data), "by": by}, cls)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `metrics.json`."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        data |= _written_blocks(self.graders, self.overall)
        data["by"] = {
            name: {value: block.to_dict() for value, block in blocks.items()} for name, blocks in self.by.items()
        }
        for name in ("by", "cluster", "benchmark", "notices"):  # written only if there is something to say
            if not data[name]:
                del data[name]
        if not self.answers.pending:
            del data["answers"]["pending"]
        return data

    @property
    def shares(self) -> dict[str, float | None]:
        """The numbers of the whole run that a gate can name."""
        whole, graded = self.answers.whole / self.total, self.graded / self.total
        return {
            "score": self.score,
            "passed": self.passed,
            "coverage": self.coverage,
            "whole": whole,
            "graded": graded if self.graders else None,
        }

    @property
    def lacks_outputs(self) -> bool:
        """True if errors were accepted in place of outputs."""
        return self.answers.errors > 0

    @property
    def lacks_verdicts(self) -> bool:
        """True if errors were accepted in place of verdicts on outputs."""
        return any(grader.errors > self.answers.errors for grader in self.graders.values())

    def value_scores(self) -> Iterator[tuple[str, str, str, GraderMetrics]]:
        """Yield field, value, grader and statistics of everything in `by`; `overall` stands for all graders."""
        for name, values in self.by.items():
            for value, block in values.items():
                for grader, metrics in block.graders.items():
                    yield name, value, grader, metrics
                if block.overall is not None and len(self.graders) > 1:
                    yield name, value, "overall", block.overall

    @property
    def rules(self) -> dict[str, Rule]:
        """Thresholds and weights that the report was made with, by grader."""
        return {
            name: Rule(block.threshold, block.weight, block.combine)
            for name, block in self.graders.items()
            if block.weight is not None
        }


def _read_blocks(data: dict[str, Any]) -> dict[str, Any]:
    """Read the statistics of each grader and of the trials as a whole."""
    blocks = msgspec.convert(data.get("metrics"), dict[str, dict[str, Any]])
    overall = msgspec.convert(data.get("overall"), dict[str, Any] | None)
    read = GraderMetrics.from_dict
    metrics = {name: read(block) for name, block in blocks.items()}
    return {"metrics": metrics, "overall": None if overall is None else read(overall)}


def _written_blocks(graders: dict[str, GraderMetrics], overall: GraderMetrics | None) -> dict[str, Any]:
    metrics = {name: block.to_dict() for name, block in graders.items()}
    return {"metrics": metrics, "overall": None if overall is None else overall.to_dict()}


class ResultGrade(Struct, frozen=True):
    """A verdict as `results.json` has it."""

    status: GradeStatus
    score: float | None


class TrialResult(Struct, frozen=True):
    """A trial as `results.json` has it."""

    sample: str
    trial: int
    key: str
    status: GradeStatus
    score: float | None
    answer: AnswerClass | None
    """class of the answer; null without an output"""
    output: str | None
    grades: dict[str, ResultGrade]
    by: dict[str, str] | UnsetType = UNSET
    """the row's values of the fields by which results are broken down, if there are any"""
    cluster: str | UnsetType = UNSET
    """the row's value of the field that groups the samples, if there is one"""


class Results(Struct, frozen=True, kw_only=True):
    """Every trial of a finished run in the dataset's order: the content of `results.json`."""

    schema_version: str = field(name="schemaVersion", default=SCHEMA_VERSION)
    run: str
    eval: str
    trials: list[TrialResult]


Verdict = Literal["worse", "not worse", "cannot tell"]


class Check(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A check of a gate."""

    what: str
    """the metric, or the subject of another check"""
    passed: bool
    """true if the condition is met"""
    warning: bool
    """true if it is met, and worth a look all the same"""
    message: str
    """the result in words"""
    metric: str | None = None
    """only for metrics: the name"""
    value: float | None = None
    """value in this run; against a baseline, over the samples that both runs have"""
    minimum: float | None = None
    """only for a minimum: the least value that is accepted"""
    before: float | None = None
    """only against a baseline, like all that follow: value in the baseline"""
    verdict: Verdict | None = None
    """`worse`, `not worse` or `cannot tell`"""
    samples: int | None = None
    """number of samples that both runs have"""
    fell: int | None = None
    """number of samples whose score is lower than in the baseline"""
    rose: int | None = None
    """number of samples whose score is higher"""
    difference: float | None = None
    """value minus baseline"""
    low: float | None = None
    """lower bound of the difference, at the gate's confidence"""
    high: float | None = None
    """upper bound, after Holm's correction"""
    p_value: float | None = None
    """probability of a difference this low if the system did not change"""
    adjusted: float | None = None
    """this probability after Holm's correction over all metrics"""
    detectable: float | None = None
    """the smallest loss that this number of samples shows as `worse` four times out of five"""
    rows_for_margin: int | None = None
    """number of samples that would show a loss as large as the margin"""

    @property
    def mark(self) -> str:
        """`ok`, `warn` or `FAIL`, as wide as the widest of them."""
        return "FAIL" if not self.passed else "warn" if self.warning else "ok  "


class GateOutcome(Struct, frozen=True, kw_only=True):
    """The outcome of a run's gate: the content of `gate.json`."""

    schema_version: str = field(name="schemaVersion", default=SCHEMA_VERSION)
    """version of the file, MAJOR.MINOR"""
    passed: bool
    """true if all checks passed"""
    baseline: str | None
    """the run that this one was compared with, as the eval file names it; null without one"""
    checks: list[Check]
    """the checks, described below"""

    @property
    def missed(self) -> tuple[str, ...]:
        """The conditions that are not met, in words."""
        return tuple(check.message for check in self.checks if not check.passed)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Conditions that are met, and worth a look all the same."""
        return tuple(check.message for check in self.checks if check.passed and check.warning)
