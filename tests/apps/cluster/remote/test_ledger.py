"""No crash leaves a job that nobody knows of, and none is submitted twice."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from holdfast.apps.cluster.remote.ledger import (
    _TAKE,
    Disowned,
    Intent,
    JobScript,
    Ledger,
    Submitted,
    Submitter,
    fold,
)
from holdfast.apps.cluster.remote.registry import Invocation, InvocationRegistry, new_invocation
from holdfast.apps.cluster.remote.slurm import JobName, JobState, Slurm
from holdfast.errors import ClusterError, Unreachable, UsageError
from tests.apps.cluster.remote.test_slurm import QUIET, SLEEP, invocation  # noqa: F401 - a fixture
from tests.support.running import ROOT, wait_for
from tests.support.slurm import Cluster, wait_for_job

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    from holdfast.apps.cluster.remote.slurm import Submission
    from holdfast.apps.cluster.remote.transport import Transport

CRASHING = """
import os, sys
from holdfast.apps.cluster.remote.slurm import JobName, Slurm
from holdfast.apps.cluster.remote.ledger import JobScript, Ledger, Submitter
from holdfast.apps.cluster.remote.transport import Here, Ssh

way, config, directory, invocation, point = sys.argv[1:]
transport = Here() if way == "here" else Ssh("cluster", config=config)

class Crashing(Slurm):
    def submit(self, submissions):
        if point == "before sbatch":
            os._exit(9)
        super().submit(submissions)
        os._exit(9)

class Torn(Ledger):
    def write(self, *records):
        if point == "before the intent":
            os._exit(9)
        super().write(*records)

Submitter(Crashing(transport), Torn(transport, directory)).submit(
    JobScript(JobName(invocation, 0, "run"), b"#!/bin/sh\\nexec sleep 600\\n", options=["--output=/dev/null"])
)
"""


def submitter(transport: Transport, folder: Path) -> Submitter:
    """A new process's view: same directory, a journal of its own."""
    return Submitter(Slurm(transport), Ledger(transport, str(folder / "on the cluster")))


@pytest.mark.parametrize("way", ["here", "ssh"])
@pytest.mark.parametrize(
    ("point", "jobs", "expected"),
    [
        ("before the intent", 0, {"adopted": 0, "disowned": 0}),
        ("before sbatch", 0, {"adopted": 0, "disowned": 1}),
        ("after sbatch", 1, {"adopted": 1, "disowned": 0}),
    ],
)
def test_a_crash_at_any_step_of_a_submission_is_detected(
    slurm: Cluster,
    invocation: str,  # noqa: F811
    tmp_path: Path,
    way: str,
    point: str,
    jobs: int,
    expected: dict[str, int],
) -> None:
    arguments = [way, str(slurm.ssh_config), str(tmp_path / "on the cluster"), invocation, point]
    crashed = subprocess.run([sys.executable, "-c", CRASHING, *arguments], cwd=ROOT, env=slurm.env)
    assert crashed.returncode == 9

    after = submitter(slurm.here, tmp_path).reconcile()
    assert {"adopted": len(after.adopted), "disowned": len(after.disowned)} == expected
    assert after.doubtful == []
    there = Slurm(slurm.here).jobs(invocation=invocation)
    assert len(there) == jobs
    assert [job.id for job in after.adopted] == [job.id for job in there]
    again = submitter(slurm.here, tmp_path)
    assert again.reconcile() == ([], [], [])  # an answer is final
    assert [job.id for job in again.ledger.jobs() if job.id] == [job.id for job in there]
    assert not any(job.open for job in again.ledger.jobs())


def test_a_submitted_job_has_its_intent_and_the_ledger_its_id(
    transport: Transport,
    slurm: Cluster,
    invocation: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    registry = InvocationRegistry(tmp_path / "registry")
    registry.add(Invocation(invocation, time.time(), str(tmp_path), ("gsm8k",)))
    ledger = Ledger(transport, str(tmp_path / "on the cluster"), mirror=registry.mirror(invocation))
    name = JobName(invocation, 0, "run")
    script = b'#!/bin/sh\nprintf %s "$HOLDFAST_INTENT"\n'
    output = [f"--output={tmp_path}/out"]
    job = Submitter(Slurm(transport), ledger).submit(JobScript(name, script, options=output))
    state = wait_for_job(Slurm(transport), str(name), lambda state: not state.active)
    assert job.matches(state) and state.id == job.id
    assert (tmp_path / "out").read_text() == job.intent.intent
    assert Ledger(slurm.here, str(tmp_path / "on the cluster")).jobs() == [job]
    assert fold(registry.get(invocation).jobs) == [job]
    assert not ledger.is_disowned(job.intent.intent)


def test_a_refused_job_is_recorded_with_the_reason(slurm: Cluster, invocation: str, tmp_path: Path) -> None:  # noqa: F811
    here = submitter(slurm.here, tmp_path)
    with pytest.raises(ClusterError, match="invalid partition"):
        here.submit(JobScript(JobName(invocation, 0, "run"), SLEEP, options=["--partition=nowhere"]))
    (job,) = here.ledger.jobs()
    assert job.disowned is not None and "invalid partition" in job.disowned


class Interrupted(Slurm):
    """Somebody else does something in the middle of a submission."""

    def __init__(self, transport: Transport, middle: Any) -> None:
        super().__init__(transport)
        self.middle = middle

    def submit(self, submissions: Sequence[Submission]) -> Any:
        self.middle(submissions[0].comment)
        return super().submit(submissions)


def test_a_submission_under_way_is_in_doubt_and_not_touched(slurm: Cluster, invocation: str, tmp_path: Path) -> None:  # noqa: F811
    other = submitter(slurm.here, tmp_path)
    here = submitter(slurm.here, tmp_path)
    seen = []
    here.slurm = Interrupted(slurm.here, lambda _: seen.append(reconcile_as_another_process(slurm, tmp_path)))
    job = here.submit(JobScript(JobName(invocation, 0, "run"), SLEEP, options=QUIET))
    assert seen == ["0 0 1"]
    assert [recorded.id for recorded in other.ledger.jobs()] == [job.id]


def reconcile_as_another_process(slurm: Cluster, folder: Path) -> str:
    code = (
        "import sys; from pathlib import Path; from tests.apps.cluster.remote.test_ledger import submitter;"
        "from holdfast.apps.cluster.remote.transport import Here;"
        "print(*map(len, submitter(Here(), Path(sys.argv[1])).reconcile()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, env=slurm.env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_submitter_that_was_disowned_cancels_only_its_own_job(
    slurm: Cluster,
    invocation: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    slow, other = submitter(slurm.here, tmp_path), submitter(slurm.here, tmp_path)
    name = JobName(invocation, 0, "run")
    winners = []

    def taken_over(intent: str) -> None:
        assert [job.intent.intent for job in other.reconcile(doubt=0).disowned] == [intent]
        winners.append(other.submit(JobScript(name, SLEEP, options=QUIET)))

    slow.slurm = Interrupted(slurm.here, taken_over)
    with pytest.raises(ClusterError, match="taken over"):
        slow.submit(JobScript(name, SLEEP, options=QUIET))

    def active() -> list[str]:
        return [job.id for job in Slurm(slurm.here).jobs(names=[str(name)]) if job.active]

    wait_for(lambda: active() == [winners[0].id], "one job to be left")


def test_a_job_that_appears_after_it_was_disowned_does_not_work(
    slurm: Cluster,
    invocation: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    late = submitter(slurm.here, tmp_path)
    intent = Intent("00112233445566aa", str(JobName(invocation, 0, "run")), "", time.time() - 999, "elsewhere", 1, "1")
    late.ledger.write(intent)
    assert len(submitter(slurm.here, tmp_path).reconcile().disowned) == 1
    assert Ledger(slurm.here, late.ledger.directory).is_disowned(intent.intent)
    assert not Ledger(slurm.here, late.ledger.directory).is_disowned("ffffffffffffffff")


def test_without_an_answer_from_slurm_nothing_is_concluded(own_slurm: Cluster, tmp_path: Path) -> None:
    here = submitter(own_slurm.here, tmp_path)
    invocation = new_invocation()  # noqa: F811
    own_slurm.kill_controller()
    without = submitter(own_slurm.impatient, tmp_path)
    with pytest.raises(Unreachable):
        without.submit(JobScript(JobName(invocation, 0, "run"), SLEEP, options=QUIET))
    assert [job.open for job in here.ledger.jobs()] == [True]
    with pytest.raises(Unreachable):
        without.reconcile()
    assert [job.open for job in here.ledger.jobs()] == [True]
    own_slurm.script("slurm-up")
    assert len(here.reconcile().disowned) == 1
    here.submit(JobScript(JobName(invocation, 0, "run"), SLEEP, options=QUIET))
    assert len(here.slurm.jobs(invocation=invocation)) == 1


def test_an_earlier_job_of_the_same_name_is_not_adopted(slurm: Cluster, invocation: str, tmp_path: Path) -> None:  # noqa: F811
    here = submitter(slurm.here, tmp_path)
    name = JobName(invocation, 0, "run")
    here.submit(JobScript(name, SLEEP, options=QUIET))
    here.ledger.write(Intent("00112233445566aa", str(name), "", time.time() - 999, "elsewhere", 1, "1"))

    class WithoutComments(Slurm):
        """A cluster that keeps no comments."""

        def jobs(self, **keys: Any) -> list[JobState]:
            return [replace(job, comment="") for job in super().jobs(**keys)]

    here.slurm = WithoutComments(slurm.here)
    assert here.reconcile().adopted == []
    assert [job.disowned is None for job in here.ledger.jobs()] == [False, True]


def test_a_torn_record_does_not_hide_the_others(slurm: Cluster, tmp_path: Path) -> None:
    one, two = Ledger(slurm.here, str(tmp_path)), Ledger(slurm.here, str(tmp_path))
    intents = [Intent(f"{number:016x}", "hf-x", "", float(number), "h", 1, "1") for number in range(3)]
    one.write(intents[0])
    one.write(intents[1])
    two.write(intents[2])
    (file,) = (path for path in tmp_path.iterdir() if intents[1].intent in path.read_text())
    file.write_bytes(file.read_bytes()[:-20])
    assert [job.intent for job in one.jobs()] == [intents[0], intents[2]]
    one.write(intents[1])
    assert [job.intent for job in two.jobs()] == intents


def test_the_order_of_records_does_not_matter() -> None:
    intent = Intent("a" * 16, "hf-x", "", 1.0, "h", 1, "1")
    records: Sequence[Any] = [intent, intent, Disowned("a" * 16, 2.0, "slow"), Submitted("a" * 16, "7", 3.0)]
    folded = {str(fold(order)) for order in itertools.permutations(records)}
    assert len(folded) == 1
    assert fold(records)[0].id == "7" and not fold(records)[0].open


@pytest.mark.parametrize(
    ("name", "comment", "seen"),
    [
        ("hf-x", "a" * 16, True),
        ("hf-x", "b" * 16, False),
        ("hf-x", "", True),
        ("hf-x", "set by the site", True),
        ("hf-y", "a" * 16, False),
    ],
)
def test_a_job_is_known_by_name_and_comment_never_by_its_id(name: str, comment: str, seen: bool) -> None:
    (job,) = fold([Intent("a" * 16, "hf-x", "", 1.0, "h", 1, "1"), Submitted("a" * 16, "7", 2.0)])
    assert job.matches(JobState("7", None, name, comment, "running")) is seen


def test_an_id_is_found_by_its_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    registry = InvocationRegistry()
    assert registry.all() == []
    invocations = [
        Invocation(name, float(number), "/shared/x", ("a", "b"), host="cluster")
        for number, name in enumerate(["480d3c89bfe4a55c", "480e000000000000", "ffff000000000000"])
    ]
    for one in invocations:
        registry.add(one)
    assert (tmp_path / "invocations" / "480d3c89bfe4a55c.json").exists()
    assert InvocationRegistry().all() == invocations[::-1]
    assert registry.resolve("f") == (invocations[2], None)
    assert registry.resolve("480d.1") == (invocations[0], 1)
    assert registry.resolve("480d3c89bfe4a55c") == (invocations[0], None)
    for text, message in {
        "480": "480d3c89bfe4a55c, 480e000000000000",
        "9": "no invocation 9",
        "480d.2": "has 2 tasks",
        "../x": "is not the id of an invocation",
        "480d*": "is not the id of an invocation",
    }.items():
        with pytest.raises(UsageError, match=message):
            registry.resolve(text)


def test_a_turn_that_is_given_back_while_another_process_asks_for_it_has_a_name(tmp_path: Path) -> None:
    """Nobody could give back a turn without one. The first `mkdir` fails here as if the holder had just gone."""
    late = 'tries=0; mkdir() { tries=$((tries + 1)); [ $tries != 1 ] && command mkdir "$@"; }\n'
    subprocess.run(["sh", "-c", late + _TAKE, "sh", tmp_path / "submitting", "me"], check=True)
    assert (tmp_path / "submitting" / "by").read_text() == "me\n"
