"""Check whether a profile works, one check after the other, each with a remedy if it fails.

It runs one tiny job, and leaves nothing on the cluster, not even the directory if it did not exist.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from holdfast.apps.cluster.config.profiles import (
    display_path,
    find_env_file,
    folder_problem,
    load_profile,
    squash_problem,
)
from holdfast.apps.cluster.remote.chain import SlurmExecutor
from holdfast.apps.cluster.remote.executor import find_executor
from holdfast.apps.cluster.remote.ledger import JobScript, Ledger, Submitter
from holdfast.apps.cluster.remote.registry import new_invocation
from holdfast.apps.cluster.remote.slurm import JobName, Slurm, explain
from holdfast.apps.cluster.remote.transport import Here, connect
from holdfast.errors import ClusterError, HoldfastError, Unreachable, with_hint
from holdfast.graders.programs import CONFINE, Isolation, isolation
from holdfast.plugins.exporters.wandb import detect

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from holdfast.apps.cluster.config.profiles import Profile
    from holdfast.apps.cluster.remote.executor import Executor
    from holdfast.apps.cluster.remote.slurm import JobState
    from holdfast.apps.cluster.remote.transport import Completed, Transport

JOB_SECONDS: Final = 120.0
"""how long the job of the check may wait and run"""
OLDEST_SLURM: Final = (20, 11)
_SLOW_SYNCS: Final = 5.0
_SLOW_MB: Final = 20.0


class DoctorCheck(msgspec.Struct, frozen=True):
    """The result of one check."""

    name: str
    state: Literal["ok", "failed", "skipped"]
    message: str = msgspec.field(name="said")
    remedy: str = ""

    def __str__(self) -> str:
        sign = {"ok": "✓", "failed": "✗", "skipped": "–"}[self.state]
        return with_hint(f"{sign} {self.name}: {self.message}", self.remedy, indent="    ")


def ok(name: str, message: str, advice: str = "") -> DoctorCheck:
    """Return a passed check, perhaps with advice."""
    return DoctorCheck(name, "ok", message, advice)


def failed(name: str, message: str, remedy: str) -> DoctorCheck:
    """Return a failed check with its remedy."""
    return DoctorCheck(name, "failed", message, remedy)


def skipped(name: str, message: str, advice: str = "") -> DoctorCheck:
    """Return a check that was not made, or that is not needed."""
    return DoctorCheck(name, "skipped", message, advice)


def diagnose(
    name: str, cwd: Path, environ: Mapping[str, str], *, job: bool = True, transport: Transport | None = None
) -> Iterator[DoctorCheck]:
    """Yield the checks of a profile, each as soon as it is done. Checks that depend on a failed one are left out."""
    try:
        profile = load_profile(name, cwd, environ)
        file = find_env_file(cwd, environ)
    except HoldfastError as error:
        yield failed("env.toml", error.message, error.remedy or "Correct the file there.")
        return
    assert file is not None
    yield ok(
        "env.toml", f"{display_path(file, cwd)}, [{name}] in line {profile.line}, executor {profile.fields.executor}"
    )
    fields = profile.fields
    executor = find_executor(fields.executor or "slurm")
    slurm = isinstance(executor, SlurmExecutor)
    remote = not executor.is_local and fields.tunnel == "ssh"
    transport = transport or connect(fields.host if remote else None, fields.user, fields.identity)
    try:
        yield from _connection_check(transport)
        doctor = _Doctor(profile, transport, executor, job=job)
        yield from doctor.slurm_checks() if slurm else ()
        yield from doctor.directory_checks()
        if executor.is_local:
            yield _sandbox(isolation())
        yield from doctor.container_checks() if slurm else ()
    except Unreachable as error:
        yield failed("connection", error.message, error.remedy or "Try again when the cluster answers.")
    yield _wandb(profile, environ)


def _connection_check(transport: Transport) -> Iterator[DoctorCheck]:
    if isinstance(transport, Here):
        yield skipped("ssh", "not needed: everything is on this machine")
        return
    begun = time.monotonic()
    transport.check(["true"])
    first = time.monotonic() - begun
    begun = time.monotonic()
    transport.check(["true"])
    yield ok("ssh", f"{transport.host} answers: first {first:.1f} s, then {time.monotonic() - begun:.2f} s a command")


class _Doctor:
    def __init__(self, profile: Profile, transport: Transport, executor: Executor, *, job: bool) -> None:
        self.profile = profile
        self.executor = executor
        self.fields = profile.fields
        self.transport = transport
        self.job = job
        self.base: str | None = None
        self.accepted = False
        self.partitions: list[str] = []
        """the profile's partitions that exist"""
        self.isolation: Isolation | None = None
        """of programs on the compute node that ran the job"""

    # Slurm

    def slurm_checks(self) -> Iterator[DoctorCheck]:
        """Check sbatch, the partitions, and whether Slurm would accept a job of this profile."""
        answer = self.transport.run(["sbatch", "--version"])
        if answer.code != 0:
            yield failed(
                "sbatch",
                f"not found on {self.transport.host}" if answer.code == 127 else answer.stderr.strip(),
                "Slurm's programs must be on the PATH of a non-login shell: add them in ~/.bashrc, "
                "before it returns for such shells.",
            )
            return
        text = answer.text.strip()
        version = re.search(r"(\d+)\.(\d+)", text)
        if version and (int(version[1]), int(version[2])) < OLDEST_SLURM:
            yield failed("sbatch", f"{text} is older than {OLDEST_SLURM[0]}.{OLDEST_SLURM[1]}", "Ask for a newer one.")
        else:
            yield ok("sbatch", text)
        yield from self._partitions()
        yield self._test_only()

    def _partitions(self) -> Iterator[DoctorCheck]:
        listing = self.transport.run(["sinfo", "--noheader", "--format=%R|%a|%l|%D|%T"])
        if listing.code != 0:
            message = listing.stderr.strip()
            if "contact" in message:
                raise Unreachable(f"{self.transport.host}: {message}", remedy="Slurm's controller does not answer.")
            yield skipped("partition", f"sinfo failed: {message}")
            return
        partitions: dict[str, list[list[str]]] = {}
        for row in (line.split("|") for line in listing.text.splitlines()):
            if len(row) == 5:
                partitions.setdefault(row[0], []).append(row)
        for key in ("partition", "run_partition", "batch_partition", "build_partition"):
            names = getattr(self.fields, key)
            if names is None:
                if key == "partition":
                    yield skipped("partition", "none is named: Slurm's default is used")
                continue
            for name in names.split(","):
                yield self._partition(key, name, partitions)

    def _partition(self, key: str, name: str, partitions: Mapping[str, list[list[str]]]) -> DoctorCheck:
        place = self.profile.origins.get(key, self.profile.place)
        if name not in partitions:
            return failed(key, f"there is no {name}", f"{place}: there are {', '.join(sorted(partitions))}.")
        rows = partitions[name]
        if not any(row[1] == "up" for row in rows):
            return failed(key, f"{name} is {rows[0][1]}", f"Wait until it is opened, or name another at {place}.")
        nodes = ", ".join(f"{row[3]} {row[4]}" for row in rows)
        return ok(key, f"{name}: {nodes} nodes, time limit {rows[0][2]}")

    def _options(self) -> list[str]:
        fields = self.fields
        values = {"account": fields.account, "partition": fields.run_partition or fields.partition, "time": fields.time}
        return [f"--{key}={value}" for key, value in values.items() if value]

    def _test_only(self) -> DoctorCheck:
        """Check account, partition and time together, as Slurm itself sees them."""
        name = "account, partition and time"
        shape = [f"--nodes={self.fields.nodes or 1}"]
        if self.fields.gpus_per_node:
            shape.append(f"--gpus-per-node={self.fields.gpus_per_node}")
        script = b"#!/bin/sh\ntrue\n"
        answer = self.transport.run(["sbatch", "--test-only", *self._options(), *shape], input=script)
        message = " ".join(answer.stderr.split())
        if answer.code == 0:
            self.accepted = True
            start = re.search(r"to start at (\S+)", message)
            return ok(name, "a job would be accepted" + (f", to start at {start[1]}" if start else ""))
        reason = re.sub(r"^(sbatch: error: |allocation failure: )+", "", message)
        word = re.search(r"Invalid (account|partition|qos)|time limit|node configuration", reason, re.IGNORECASE)
        key = {"account": "account", "partition": "partition", "time limit": "time"}.get(
            (word[1] or word[0]).lower() if word else "", "partition"
        )
        where = self.profile.origins.get(key, self.profile.place)
        remedy = f"{where}: correct account, partition, time, nodes or gpus_per_node."
        accounts = self.transport.run(
            ["sh", "-c", "sacctmgr -nP show assoc user=$(id -un) format=Account,Partition | sort -u"]
        )
        if accounts.code == 0 and accounts.text.strip():
            remedy += f" Yours are: {', '.join(accounts.text.split())} (account|partition)."
        return failed(name, reason or f"sbatch ended with exit code {answer.code}", remedy)

    # The shared directory

    def directory_checks(self) -> Iterator[DoctorCheck]:
        """Check that it can be written, fast enough, in the ways that are needed, and from a node."""
        folder = self.fields.remote_job_dir
        where = self.profile.origins.get("remote_job_dir", self.profile.place)
        if folder is None:
            yield skipped("remote_job_dir", "none is named: ./.holdfast is used")
            folder = os.path.abspath(".holdfast")  # noqa: PTH100 - it may be another machine's
        if problem := folder_problem(folder, self.executor):
            yield failed("remote_job_dir", problem, f"{where}: correct it.")
            return
        answer = self.transport.run(["sh", "-c", _WRITE, "sh", folder], timeout=180)
        try:
            yield from self._directory(folder, where, answer)
        finally:
            created = [line.removeprefix("made=") for line in answer.text.splitlines() if line.startswith("made=")]
            if created:
                self.transport.run(["rmdir", "--", *created])  # a directory that is in use by now stays

    def _directory(self, folder: str, where: str, answer: Completed) -> Iterator[DoctorCheck]:
        if answer.code != 0:
            yield failed(
                "remote_job_dir", f"{folder}: {_last(answer.stderr)}", f"{where}: name a directory that you may write."
            )
            return
        facts = dict(line.split("=", 1) for line in answer.text.splitlines() if "=" in line)
        self.base = facts["base"]
        yield ok("remote_job_dir", f"{self.base} ({facts['type']}, {facts['free']} free) can be written")
        yield self._speed(facts)
        broken = [word for word in ("exclusive", "rename", "append") if facts.get(word) != "ok"]
        if broken:
            yield failed(
                "files",
                f"{self.base}: {', '.join(broken)} does not work as POSIX says",
                "Choose a directory on another file system: runs are not safe here.",
            )
        else:
            yield ok("files", "creating exclusively, renaming and appending work")
        if isinstance(self.executor, SlurmExecutor):
            yield self._node()
            if self.isolation is not None:
                yield _sandbox(self.isolation)

    def _speed(self, facts: Mapping[str, str]) -> DoctorCheck:
        megabytes = 16 / max(0.001, float(facts["write"]))
        syncs = 20 / max(0.001, float(facts["sync"]))
        message = f"{megabytes:,.0f} MB/s, {syncs:,.0f} synced writes a second"
        slow = megabytes < _SLOW_MB or syncs < _SLOW_SYNCS
        advice = "That is slow: many workers will wait. Choose another file system if there is one."
        return ok("write speed", message, advice if slow else "")

    def _node(self) -> DoctorCheck:
        """Run a tiny job, to check that a node sees the directory and what is installed there."""
        name = "compute node"
        if not self.job:
            return skipped(name, "no job was run, as asked")
        if not self.accepted:
            return skipped(name, "no job was run: Slurm would not accept it")
        assert self.base is not None
        folder = f"{self.base}/holdfast/doctor-{secrets.token_hex(4)}"
        slurm, job_name = Slurm(self.transport), JobName(new_invocation(), 0, "doctor")
        self.transport.check(["mkdir", "-p", folder])
        options = [option for option in self._options() if not option.startswith("--time=")]
        options += ["--time=2", "--nodes=1", "--ntasks=1", "--no-requeue", f"--output={folder}/log"]
        begun = time.monotonic()
        try:
            token = secrets.token_hex(8)
            self.transport.check(["sh", "-c", 'cat >"$1/token"', "sh", folder], input=token.encode())
            script = JobScript(job_name, self._script(folder), options=options)
            Submitter(slurm, Ledger(self.transport, folder)).submit(script)
            state = _await(slurm, str(job_name), begun)
            if state is not None and state.active:
                why = f": {explain(state.reason)}" if state.reason else ""
                return skipped(
                    name, f"the job was {state.state} for {JOB_SECONDS:.0f} s{why}", "Try again when nodes are free."
                )
            try:
                lines = self.transport.read(f"{folder}/answer").decode().splitlines()
            except FileNotFoundError:
                return failed(
                    name,
                    f"the job ended ({state.state if state else 'gone'}) and {folder} has no answer",
                    "The directory must be mounted on compute nodes, at the same path: name such a directory.",
                )
            facts = dict(line.split("=", 1) for line in lines if "=" in line)
            if facts.get("token") != token:
                return failed(name, "a node sees other files than the login node", "Name a directory that both share.")
            return self._installed(name, facts, time.monotonic() - begun)
        except ClusterError as error:
            return failed(name, error.message, error.remedy or "Fix what Slurm reports.")
        finally:
            slurm.cancel([str(job_name)])
            self.transport.run(["rm", "-rf", "--", folder])

    @property
    def _python(self) -> str:
        return self.fields.python or "python3"

    def _script(self, folder: str) -> bytes:
        """Return the script of the job, which writes what it sees into the folder."""
        setup = [*(self.fields.setup_lines or []), *(self.fields.startup_commands or [])]
        names = [f"folder={shlex.quote(folder)}", f"python={shlex.quote(self._python)}"]
        look = _NODE.replace("CONFINE_SOURCE", CONFINE.read_text(encoding="utf-8"))
        return "\n".join(["#!/bin/bash", *setup, *names, look]).encode()

    def _installed(self, name: str, facts: Mapping[str, str], seconds: float) -> DoctorCheck:
        """Check the Python of a node, and note how it confines programs."""
        with suppress(msgspec.MsgspecError):
            self.isolation = msgspec.json.decode(facts.get("isolation", ""), type=Isolation)
        version = facts.get("python", "")
        message = f"{facts.get('host')} sees the directory; job to answer {seconds:.0f} s; "
        if _old_python(version):
            return failed(
                name,
                message + (f"Python {version}" if version else f"no {self._python}"),
                "Jobs need Python 3.11 or later: name one in the profile (python = …), or load it in setup_lines.",
            )
        return ok(name, message + f"Python {version}, enroot {facts.get('enroot') or 'missing'}")

    # Containers

    def container_checks(self) -> Iterator[DoctorCheck]:
        """Check what images need: pyxis to run them, enroot to import them."""
        image = self.fields.container_image or self.fields.container
        count = self.transport.run(["sh", "-c", "srun --help 2>/dev/null | grep -c -- --container-image"]).text.strip()
        pyxis = count.isdigit() and int(count) > 0
        if pyxis:
            yield ok("containers", "srun has --container-image (pyxis)")
        elif image is None:
            yield skipped("containers", "srun has no --container-image (pyxis); servers run as plain processes")
        else:
            yield failed(
                "containers",
                f"{image} is named, and srun has no --container-image (pyxis)",
                "Ask for pyxis on this cluster, or leave the image out: then servers run as plain processes.",
            )
        if image is None or image.endswith(".sqsh"):
            return
        problem = squash_problem(self.profile)
        if problem is not None:
            yield failed("auto-squash", problem, "Complete the profile, or name a .sqsh file.")
        else:
            yield ok("auto-squash", f"{image} is imported below {self.fields.remote_job_dir}/containers")


def _sandbox(able: Isolation) -> DoctorCheck:
    """Report how programs of graders are confined; evals without such programs need nothing of it."""
    whole = able.writes and able.read_only and able.processes and able.network == "namespace"
    return ok(
        "programs of graders",
        able.summary,
        "" if whole else "With user namespaces they would be confined: see docs/graders-files.md.",
    )


def _wandb(profile: Profile, environ: Mapping[str, str]) -> DoctorCheck:
    project = profile.wandb.project
    message = f"project {project}" if project else "no [wandb] project in env.toml"
    login = detect(environ)
    if login.api_key is None:
        return skipped(
            "W&B", f"no login found; {message}", "If results go to W&B: run `wandb login`, or set WANDB_API_KEY."
        )
    return ok("W&B", f"login for {login.base_url} found; {message}")


def _await(slurm: Slurm, name: str, begun: float) -> JobState | None:
    """Return the job once it has ended, or as it is when time is up."""
    while True:
        states = slurm.jobs(names=[name])
        state = states[0] if states else None
        if state is None or not state.active or time.monotonic() - begun > JOB_SECONDS:
            return state
        time.sleep(0.5)


def _old_python(text: str) -> bool:
    version = re.match(r"(\d+)\.(\d+)", text)
    return version is None or (int(version[1]), int(version[2])) < (3, 11)


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["cannot be written"])[-1]


# One script for everything, so that it takes one round trip.
_WRITE: Final = r"""
set -e
case $1 in "~"|"~/"*) set -- "$HOME${1#\~}";; esac
missing=$1/holdfast
while ! test -e "$missing"; do echo "made=$missing"; missing=$(dirname -- "$missing"); done
mkdir -p -- "$1/holdfast"
cd -- "$1"
echo "base=$PWD"
echo "type=$(stat -f -c %T .)"
echo "free=$(df -hP . | awk 'NR == 2 {print $4}')"
stage=$(mktemp -d holdfast/.doctor-XXXXXX)
trap 'rm -rf "$stage"' EXIT
now() { date +%s.%N; }
begun=$(now); dd if=/dev/zero of="$stage/block" bs=1M count=16 conv=fsync status=none
echo "write=$(echo "$(now) $begun" | awk '{print $1 - $2}')"
begun=$(now); dd if=/dev/zero of="$stage/syncs" bs=512 count=20 oflag=dsync status=none
echo "sync=$(echo "$(now) $begun" | awk '{print $1 - $2}')"
set +e
(set -C; echo a >"$stage/one") && ! (set -C; echo b >"$stage/one") 2>/dev/null && echo exclusive=ok
echo new >"$stage/new" && mv -T "$stage/new" "$stage/one" && test "$(cat "$stage/one")" = new && echo rename=ok
echo more >>"$stage/one" && test "$(wc -l <"$stage/one")" -eq 2 && echo append=ok
exit 0
"""

_NODE: Final = r"""{
    echo "token=$(cat "$folder/token")"
    echo "host=$(hostname)"
    echo "python=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null)"
    echo "enroot=$(enroot version 2>/dev/null | head -n 1)"
    printf isolation=
    "$python" -I -S - probe "${TMPDIR:-/tmp}" 2>/dev/null <<'END_OF_CONFINE'
CONFINE_SOURCE
END_OF_CONFINE
    echo
} >"$folder/answer.new"
mv "$folder/answer.new" "$folder/answer"
"""
