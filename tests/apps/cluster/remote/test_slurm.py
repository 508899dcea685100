"""Jobs on a real Slurm: submitted, seen, cancelled, directly and over ssh, and never mistaken for somebody else's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from holdfast.apps.cluster.remote.registry import new_invocation
from holdfast.apps.cluster.remote.slurm import (
    JobName,
    JobState,
    Slurm,
    explain,
    read_sacct,
    read_squeue,
    read_state,
)
from holdfast.apps.cluster.remote.transport import Here, Transport
from holdfast.errors import ClusterError, Unreachable
from tests.support.breaking import needs_root
from tests.support.running import wait_for
from tests.support.slurm import Cluster, submit_script, wait_for_job

if TYPE_CHECKING:
    from collections.abc import Iterator

SLEEP = b"#!/bin/sh\nexec sleep 600\n"
QUIET = ("--output=/dev/null",)


@pytest.fixture
def invocation(slurm: Cluster) -> Iterator[str]:
    """An id whose jobs are cancelled at the end."""
    identifier = new_invocation()
    yield identifier
    here = Slurm(slurm.here)
    here.cancel({job.name for job in here.jobs(invocation=identifier) if job.active})


def submit(slurm: Slurm, invocation: str, script: bytes, *options: str, role: str = "run", task: int = 0) -> str:
    """Submit a job and return its name."""
    name = str(JobName(invocation, task, role))
    submit_script(slurm, script, name=name, comment="0123456789abcdef", options=[*QUIET, *options])
    return name


@pytest.mark.parametrize(
    ("body", "state"), [("true", "completed"), ("exit 3", "failed"), ("sleep 0.1; kill -9 $$", "failed")]
)
def test_a_job_is_seen_to_its_end(transport: Transport, invocation: str, body: str, state: str) -> None:
    slurm = Slurm(transport)
    name = submit(slurm, invocation, f"#!/bin/sh\n{body}\n".encode(), "--begin=now")
    job = wait_for_job(slurm, name, lambda job: not job.active)
    assert job.state == state
    assert job.comment == "0123456789abcdef"
    assert job.nodes.startswith("node")
    assert job.start is not None and time.time() - 60 < job.start <= time.time()
    assert job.reason == job.why == ""


@needs_root
def test_each_node_of_the_lab_has_a_host_name_of_its_own_that_the_others_know(slurm: Cluster) -> None:
    script = 'test "$(hostname)" = "$SLURMD_NODENAME" && getent hosts node1 node4'
    known = slurm.here.check(["srun", "--nodes=4", "sh", "-c", script]).text.split()
    assert (known.count("node1"), known.count("node4")) == (4, 4)


def test_a_running_job_is_running_and_a_cancelled_one_cancelled(transport: Transport, invocation: str) -> None:
    slurm = Slurm(transport)
    name = submit(slurm, invocation, SLEEP)
    job = wait_for_job(slurm, name, lambda job: job.state == "running")
    assert job.elapsed is not None
    slurm.cancel([name])
    assert wait_for_job(slurm, name, lambda job: not job.active).state == "cancelled"
    slurm.cancel([name])  # what has ended is no error


@pytest.mark.parametrize(
    ("option", "reason", "sentence"),
    [
        ("--hold", "JobHeldUser", "scontrol release"),
        ("--begin=now+1hour", "BeginTime", "starts at its time"),
        ("--nodes=9", "PartitionNodeLimit", "more nodes than the partition"),
    ],
)
def test_a_pending_job_says_why(slurm: Cluster, invocation: str, option: str, reason: str, sentence: str) -> None:
    name = submit(Slurm(slurm.here), invocation, SLEEP, option)
    job = wait_for_job(Slurm(slurm.here), name, lambda job: job.reason == reason)
    assert job.state == "pending"
    assert sentence in job.why


def test_a_dependency_that_can_never_be_met_is_reported(slurm: Cluster, invocation: str) -> None:
    here = Slurm(slurm.here)
    (first,) = here.jobs(names=[submit(here, invocation, SLEEP, "--hold", role="first")])
    name = submit(here, invocation, SLEEP, f"--dependency=afterok:{first.id}")
    assert "another job" in wait_for_job(here, name, lambda job: job.reason == "Dependency").why
    here.cancel([first.name])
    assert "never" in wait_for_job(here, name, lambda job: job.reason == "DependencyNeverSatisfied").why


def test_every_member_of_an_array_is_a_job(transport: Transport, invocation: str) -> None:
    slurm = Slurm(transport)
    name = submit(slurm, invocation, SLEEP, "--array=0-3%2")

    def members() -> dict[int | None, JobState]:
        return {job.task: job for job in slurm.jobs(invocation=invocation)}

    wait_for(lambda: [job.state for job in members().values()].count("running") == 2, "two members to run")
    assert set(members()) == {0, 1, 2, 3}
    assert len({job.id for job in members().values()}) == 1
    slurm.cancel(ids={members()[0].handle: name})
    wait_for(lambda: members()[0].state == "cancelled", "one member to be cancelled")
    assert all(members()[task].active for task in (1, 2, 3))
    slurm.cancel([name])
    wait_for(lambda: not any(job.active for job in members().values()), "all to be cancelled")


def test_only_the_named_jobs_are_cancelled(transport: Transport, invocation: str) -> None:
    slurm = Slurm(transport)
    ours = submit(slurm, invocation, SLEEP)
    others = [
        submit(slurm, invocation, SLEEP, role="run-2"),
        submit(slurm, invocation, SLEEP, task=1),
    ]
    (job,) = slurm.jobs(names=[others[0]])
    slurm.cancel(ids={job.handle: ours})  # an id that has become another job's
    slurm.cancel([ours])
    wait_for_job(slurm, ours, lambda job: not job.active)
    assert [job.active for job in slurm.jobs(names=others)] == [True, True]
    with pytest.raises(ValueError, match="not a job of ours"):
        slurm.cancel([""])


def test_a_script_may_be_given_by_its_path(
    slurm: Cluster, invocation: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = tmp_path_factory.mktemp("script") / "run.sh"
    script.write_text('#!/bin/sh\ntest "$WORD" = "a b"\n')
    here = Slurm(slurm.here)
    name = str(JobName(invocation, 0, "run"))
    submit_script(here, str(script), name=name, comment="", options=QUIET, env={"WORD": "a b"})
    assert wait_for_job(here, name, lambda job: not job.active).state == "completed"


def test_a_refusal_carries_slurms_message(transport: Transport, invocation: str) -> None:
    with pytest.raises(ClusterError, match="invalid partition"):
        submit(Slurm(transport), invocation, SLEEP, "--partition=nowhere")
    assert Slurm(transport).jobs(invocation=invocation) == []


def test_a_users_own_settings_hide_no_job(slurm: Cluster, invocation: str) -> None:
    name = submit(Slurm(slurm.here), invocation, SLEEP, "--begin=now+1hour")
    env = {
        **slurm.env,
        "SQUEUE_PARTITION": "low",
        "SQUEUE_STATES": "RUNNING",
        "SQUEUE_USERS": "nobody",
        "SQUEUE_NAMES": "x",
        "SQUEUE_FORMAT": "%i",
        "SLURM_TIME_FORMAT": "relative",
    }
    (job,) = Slurm(Here(env=env)).jobs(names=[name])
    assert job.start is not None


def test_without_accounting_the_job_history_is_unavailable(slurm: Cluster) -> None:
    assert Slurm(slurm.here).query_accounting(["hf-x"], since=0.0) is None


def test_a_machine_without_slurm_is_reported(slurm: Cluster) -> None:
    with pytest.raises(ClusterError, match="there is no squeue"):
        Slurm(Here(env={"PATH": "/nowhere"})).jobs(names=["x"])


def test_a_colleague_sees_a_job_but_does_not_cancel_it(slurm: Cluster, invocation: str) -> None:
    if "Host colleague" not in slurm.ssh_config.read_text():
        pytest.skip("only root can make a second account")
    name = submit(Slurm(slurm.here), invocation, SLEEP)
    theirs = Slurm(slurm.ssh("colleague"))
    assert [job.name for job in theirs.jobs(names=[name], mine=False)] == [name]
    assert theirs.jobs(names=[name]) == []
    theirs.cancel([name])
    assert Slurm(slurm.here).jobs(names=[name])[0].active


def test_a_killed_controller_is_unreachable_and_its_forgotten_jobs_are_not_mistaken_for_others(
    own_slurm: Cluster,
) -> None:
    slurm = Slurm(own_slurm.here)
    ours, others = new_invocation(), new_invocation()
    names = [submit(slurm, ours, SLEEP, "--hold", task=task) for task in range(3)]
    ids = {job.name: job.id for job in slurm.jobs(invocation=ours)}
    assert sorted(ids) == names
    own_slurm.kill_controller()
    with pytest.raises(Unreachable, match="controller does not answer"):
        Slurm(own_slurm.impatient).jobs(invocation=ours)
    # Slurm saves its state every few seconds; here the last save is the one before all our jobs.
    for path in (own_slurm.folder / "state").glob("job_state*"):
        path.unlink()
    own_slurm.script("slurm-up")
    foreign = [submit(slurm, others, SLEEP, "--hold", task=task) for task in range(3)]
    reused = {job.id: job.name for job in slurm.jobs(invocation=others)}
    assert set(ids.values()) <= set(reused), "the ids were to be used again"
    assert slurm.jobs(invocation=ours) == []
    slurm.cancel(names, ids={job: name for name, job in ids.items()})
    assert [job.active for job in slurm.jobs(names=foreign)] == [True, True, True]


SQUEUE = [
    ("2\x1f3\x1fhf-a\x1fabc\x1fPENDING\x1fPriority\x1f\x1fN/A\x1f0:00", "pending", 3, 0.0),
    ("9\x1fN/A\x1fhf-a\x1f(null)\x1fRUNNING\x1f\x1fn\x1f18\x1f1-02:03:04", "running", None, 93784.0),
    ("9\x1fN/A\x1fa b\x1f\x1fSPECIAL_EXIT\x1f\x1f\x1f18\x1fINVALID", "requeued", None, None),
    ("9\x1fN/A\x1fa b\x1f\x1fNEW_IN_26\x1f\x1f\x1f18\x1f2:03:04", "unknown", None, 7384.0),
]  # fmt: skip


@pytest.mark.parametrize(("line", "state", "task", "elapsed"), SQUEUE)
def test_lines_of_squeue_are_read(line: str, state: str, task: int | None, elapsed: float | None) -> None:
    job = read_squeue(line)
    assert job is not None
    assert (job.state, job.task, job.elapsed) == (state, task, elapsed)
    assert job.comment in ("", "abc")


# As sacct 22.05.8 wrote them, with slurmdbd.
SACCT = [
    ("1\x1fhf-a\x1f\x1fFAILED\x1fnode1\x1f1794786768\x1f0", "1", "failed"),
    ("3_0\x1fhf-a\x1f\x1fCANCELLED by 0\x1fnode1\x1f18\x1f6", "3_0", "cancelled"),
    ("3_1\x1fhf-a\x1f\x1fRUNNING\x1fnode1\x1f17\x1f8", "3_1", "running"),
]


@pytest.mark.parametrize(("line", "handle", "state"), SACCT)
def test_lines_of_sacct_are_read(line: str, handle: str, state: str) -> None:
    job = read_sacct(line)
    assert job is not None
    assert (job.handle, job.state) == (handle, state)


def test_other_lines_are_not_read_as_jobs() -> None:
    assert read_squeue("Welcome to the cluster!") is None
    assert read_sacct("") is None
    assert JobName.parse("wrap") is None
    assert JobName.parse("hf-0123456789abcdef.12.run-2") == JobName("0123456789abcdef", 12, "run-2")


@pytest.mark.parametrize("text", ["CANCELLED by 1000", "CANCELLED+", "CANCELLED"])
def test_a_state_with_more_words_is_still_that_state(text: str) -> None:
    assert read_state(text) == "cancelled"


@pytest.mark.parametrize(
    "reason",
    [
        "Priority",
        "Resources",
        "QOSMaxJobsPerUserLimit",
        "PartitionTimeLimit",
        "AssocGrpCpuLimit",
        "AssocGrpGRES",
        "DependencyNeverSatisfied",
        "ReqNodeNotAvail, UnavailableNodes:node[1-4]",
        "launch failed requeued held",
        "launch_failed_requeued_held",
        "(Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions)",
    ],
)
def test_common_reasons_have_a_sentence(reason: str) -> None:
    assert "Slurm says" not in explain(reason)
    assert len(explain(reason).split()) > 4
