"""Whether a profile works: one check after the other, each with what to do where it does not.

Nothing is left behind, not even the directory if it was not there; the one job that is run is tiny and has a name of
ours.
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

from holdfast.cluster.config.profiles import find_env_file, folder_problem, load_profile, shown, squash_problem
from holdfast.cluster.remote.ledger import Ledger, Submitter, new_invocation
from holdfast.cluster.remote.slurm import JobName, Slurm, explain
from holdfast.cluster.remote.transport import Here, way_to
from holdfast.errors import ClusterError, HoldfastError, Unreachable
from holdfast.graders.sandbox import CONFINE, Isolation, isolation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from holdfast.cluster.config.profiles import Profile
    from holdfast.cluster.remote.slurm import JobState
    from holdfast.cluster.remote.transport import Completed, Transport

JOB_SECONDS: Final = 120.0
"""How long the job of the check may wait and run."""
OLDEST_SLURM: Final = (20, 11)
_SLOW_SYNCS: Final = 5.0
_SLOW_MB: Final = 20.0


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    name: str
    state: Literal["ok", "failed", "skipped"]
    said: str
    remedy: str = ""

    def __str__(self) -> str:
        sign = {"ok": "✓", "failed": "✗", "skipped": "–"}[self.state]
        return f"{sign} {self.name}: {self.said}" + (f"\n    {self.remedy}" if self.remedy else "")


def ok(name: str, said: str, remedy: str = "") -> Check:
    """It is as it should be; a remedy is then advice."""
    return Check(name, "ok", said, remedy)


def failed(name: str, said: str, remedy: str) -> Check:
    """It is not, and this is what to do."""
    return Check(name, "failed", said, remedy)


def skipped(name: str, said: str, remedy: str = "") -> Check:
    """It was not looked at, or need not be there."""
    return Check(name, "skipped", said, remedy)


def diagnose(
    name: str, cwd: Path, environ: Mapping[str, str], *, job: bool = True, transport: Transport | None = None
) -> Iterator[Check]:
    """The checks of a profile, each as soon as it is known. What cannot be looked at without another is left out."""
    try:
        profile = load_profile(name, cwd, environ)
        file = find_env_file(cwd, environ)
    except HoldfastError as error:
        yield failed("env.toml", error.message, error.remedy or "Correct the file where it says.")
        return
    assert file is not None
    yield ok("env.toml", f"{shown(file, cwd)}, [{name}] in line {profile.line}, executor {profile.fields.executor}")
    fields = profile.fields
    remote = fields.executor == "slurm" and fields.tunnel == "ssh"
    way = transport or way_to(fields.host if remote else None, fields.user, fields.identity)
    try:
        yield from _reached(way)
        doctor = _Doctor(profile, way, job=job)
        yield from doctor.slurm_checks() if fields.executor == "slurm" else ()
        yield from doctor.directory_checks()
        if fields.executor != "slurm":
            yield _sandbox(isolation())
        yield from doctor.container_checks() if fields.executor == "slurm" else ()
    except Unreachable as error:
        yield failed("connection", error.message, error.remedy or "Try again when it answers.")
    yield _wandb(profile, environ)


def _reached(way: Transport) -> Iterator[Check]:
    if isinstance(way, Here):
        yield skipped("ssh", "not needed: everything is on this machine")
        return
    begun = time.monotonic()
    way.check(["true"])
    first = time.monotonic() - begun
    begun = time.monotonic()
    way.check(["true"])
    yield ok("ssh", f"{way.place} answers: first {first:.1f} s, then {time.monotonic() - begun:.2f} s a command")


class _Doctor:
    def __init__(self, profile: Profile, way: Transport, *, job: bool) -> None:
        self.profile = profile
        self.fields = profile.fields
        self.way = way
        self.job = job
        self.base: str | None = None
        self.accepted = False
        self.partitions: list[str] = []
        """that the profile names, and that exist"""
        self.isolation: Isolation | None = None
        """of programs on the compute node that ran the job"""

    # Slurm

    def slurm_checks(self) -> Iterator[Check]:
        """sbatch, the partitions, and whether a job as the profile asks for would be taken."""
        done = self.way.run(["sbatch", "--version"])
        if done.code != 0:
            yield failed(
                "sbatch",
                f"there is none on {self.way.place}" if done.code == 127 else done.stderr.strip(),
                "Slurm's programs must be on the PATH of a shell that is not a login shell: add them in ~/.bashrc, "
                "before it returns for such shells.",
            )
            return
        version = re.search(r"(\d+)\.(\d+)", done.text)
        said = done.text.strip()
        if version and (int(version[1]), int(version[2])) < OLDEST_SLURM:
            yield failed("sbatch", f"{said} is older than {OLDEST_SLURM[0]}.{OLDEST_SLURM[1]}", "Ask for a newer one.")
        else:
            yield ok("sbatch", said)
        yield from self._partitions()
        yield self._test_only()

    def _partitions(self) -> Iterator[Check]:
        done = self.way.run(["sinfo", "--noheader", "--format=%R|%a|%l|%D|%T"])
        if done.code != 0:
            if "contact" in done.stderr:
                raise Unreachable(f"{self.way.place}: {done.stderr.strip()}", remedy="Slurm's controller is silent.")
            yield skipped("partition", f"sinfo says: {done.stderr.strip()}")
            return
        known: dict[str, list[list[str]]] = {}
        for row in (line.split("|") for line in done.text.splitlines()):
            if len(row) == 5:
                known.setdefault(row[0], []).append(row)
        for key in ("partition", "run_partition", "batch_partition", "build_partition"):
            wanted = getattr(self.fields, key)
            if wanted is None:
                if key == "partition":
                    yield skipped("partition", "none is named: Slurm's default is used")
                continue
            for one in wanted.split(","):
                yield self._partition(key, one, known)

    def _partition(self, key: str, name: str, known: Mapping[str, list[list[str]]]) -> Check:
        place = self.profile.origins.get(key, self.profile.place)
        if name not in known:
            return failed(key, f"there is no {name}", f"{place}: there are {', '.join(sorted(known))}.")
        rows = known[name]
        if not any(row[1] == "up" for row in rows):
            return failed(key, f"{name} is {rows[0][1]}", f"Wait until it is opened, or name another at {place}.")
        nodes = ", ".join(f"{row[3]} {row[4]}" for row in rows)
        return ok(key, f"{name}: {nodes} nodes, time limit {rows[0][2]}")

    def _options(self) -> list[str]:
        fields = self.fields
        given = {"account": fields.account, "partition": fields.run_partition or fields.partition, "time": fields.time}
        return [f"--{key}={value}" for key, value in given.items() if value]

    def _test_only(self) -> Check:
        """Account, partition and time together, as Slurm itself sees them."""
        name = "account, partition and time"
        shape = [f"--nodes={self.fields.nodes or 1}"]
        if self.fields.gpus_per_node:
            shape.append(f"--gpus-per-node={self.fields.gpus_per_node}")
        script = b"#!/bin/sh\ntrue\n"
        done = self.way.run(["sbatch", "--test-only", *self._options(), *shape], input=script)
        said = " ".join(done.stderr.split())
        if done.code == 0:
            self.accepted = True
            start = re.search(r"to start at (\S+)", said)
            return ok(name, "a job would be taken" + (f", to start at {start[1]}" if start else ""))
        reason = re.sub(r"^(sbatch: error: |allocation failure: )+", "", said)
        word = re.search(r"Invalid (account|partition|qos)|time limit|node configuration", reason, re.IGNORECASE)
        key = {"account": "account", "partition": "partition", "time limit": "time"}.get(
            (word[1] or word[0]).lower() if word else "", "partition"
        )
        where = self.profile.origins.get(key, self.profile.place)
        remedy = f"{where}: correct account, partition, time, nodes or gpus_per_node."
        accounts = self.way.run(
            ["sh", "-c", "sacctmgr -nP show assoc user=$(id -un) format=Account,Partition | sort -u"]
        )
        if accounts.code == 0 and accounts.text.strip():
            remedy += f" Yours are: {', '.join(accounts.text.split())} (account|partition)."
        return failed(name, reason or f"sbatch ended with {done.code}", remedy)

    # The shared directory

    def directory_checks(self) -> Iterator[Check]:
        """Whether it can be written, fast enough, in the ways that are needed, and from a node."""
        wanted = self.fields.remote_job_dir
        where = self.profile.origins.get("remote_job_dir", self.profile.place)
        if wanted is None:
            yield skipped("remote_job_dir", "none is named: ./.holdfast is used")
            wanted = os.path.abspath(".holdfast")  # noqa: PTH100 - it may be another machine's
        if wrong := folder_problem(wanted, self.profile.fields.executor or "slurm"):
            yield failed("remote_job_dir", wrong, f"{where}: correct it.")
            return
        done = self.way.run(["sh", "-c", _WRITE, "sh", wanted], timeout=180)
        try:
            yield from self._directory(wanted, where, done)
        finally:
            made = [line.removeprefix("made=") for line in done.text.splitlines() if line.startswith("made=")]
            if made:
                self.way.run(["rmdir", "--", *made])  # where somebody has begun to use it, it stays

    def _directory(self, wanted: str, where: str, done: Completed) -> Iterator[Check]:
        if done.code != 0:
            yield failed(
                "remote_job_dir", f"{wanted}: {_last(done.stderr)}", f"{where}: name a directory that you may write."
            )
            return
        facts = dict(line.split("=", 1) for line in done.text.splitlines() if "=" in line)
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
        if self.fields.executor == "slurm":
            yield self._node()
            if self.isolation is not None:
                yield _sandbox(self.isolation)

    def _speed(self, facts: Mapping[str, str]) -> Check:
        megabytes = 16 / max(0.001, float(facts["write"]))
        syncs = 20 / max(0.001, float(facts["sync"]))
        said = f"{megabytes:,.0f} MB/s, {syncs:,.0f} synced writes a second"
        slow = megabytes < _SLOW_MB or syncs < _SLOW_SYNCS
        advice = "That is slow: many workers will wait for it. Choose another file system if there is one."
        return ok("write speed", said, advice if slow else "")

    def _node(self) -> Check:
        """A tiny job: whether a node sees the directory, what the login node wrote, and what it has itself."""
        name = "compute node"
        if not self.job:
            return skipped(name, "no job was run, as asked")
        if not self.accepted:
            return skipped(name, "no job was run: Slurm would not take it")
        assert self.base is not None
        folder = f"{self.base}/holdfast/doctor-{secrets.token_hex(4)}"
        slurm, invocation = Slurm(self.way), new_invocation()
        job_name = JobName(invocation, 0, "doctor")
        self.way.check(["mkdir", "-p", folder])
        options = [option for option in self._options() if not option.startswith("--time=")]
        options += ["--time=2", "--nodes=1", "--ntasks=1", "--no-requeue", f"--output={folder}/log"]
        begun = time.monotonic()
        try:
            token = secrets.token_hex(8)
            self.way.check(["sh", "-c", 'cat >"$1/token"', "sh", folder], input=token.encode())
            python = self.fields.python or "python3"
            setup = self.fields.setup_lines or []
            lines = [*([setup] if isinstance(setup, str) else setup), *(self.fields.startup_commands or [])]
            look = _NODE.replace("CONFINE_SOURCE", CONFINE.read_text(encoding="utf-8"))
            script = "\n".join(
                ["#!/bin/bash", *lines, f"folder={shlex.quote(folder)}", f"python={shlex.quote(python)}", look]
            ).encode()
            Submitter(slurm, Ledger(self.way, folder)).submit(job_name, script, options=options)
            state = _await(slurm, str(job_name), begun)
            if state is not None and state.active:
                why = f": {explain(state.reason)}" if state.reason else ""
                return skipped(
                    name, f"the job was {state.state} for {JOB_SECONDS:.0f} s{why}", "Try again when nodes are free."
                )
            try:
                lines = self.way.read(f"{folder}/answer").decode().splitlines()
            except FileNotFoundError:
                return failed(
                    name,
                    f"the job ended ({state.state if state else 'gone'}) and {folder} has no answer",
                    "The directory must be mounted on compute nodes, at the same path: name such a one.",
                )
            facts = dict(line.split("=", 1) for line in lines if "=" in line)
            if facts.get("token") != token:
                return failed(name, "a node sees other files than the login node", "Name a directory that both share.")
            version = facts.get("python", "")
            with suppress(msgspec.MsgspecError):
                self.isolation = msgspec.json.decode(facts.get("isolation", ""), type=Isolation)
            said = f"{facts.get('host')} sees the directory; job to answer {time.monotonic() - begun:.0f} s; "
            if _old_python(version):
                return failed(
                    name,
                    said + (f"Python {version}" if version else f"no {python}"),
                    "Jobs need Python 3.11 or later: name one in the profile (python = …), or load it in setup_lines.",
                )
            return ok(name, said + f"Python {version}, enroot {facts.get('enroot') or 'missing'}")
        except ClusterError as error:
            return failed(name, error.message, error.remedy or "Correct what Slurm says.")
        finally:
            slurm.cancel([str(job_name)])
            self.way.run(["rm", "-rf", "--", folder])

    # Containers

    def container_checks(self) -> Iterator[Check]:
        """What images need: pyxis to run them, enroot to make them."""
        image = self.fields.container_image or self.fields.container
        done = self.way.run(["sh", "-c", "srun --help 2>/dev/null | grep -c -- --container-image"])
        pyxis = done.text.strip().isdigit() and int(done.text.strip()) > 0
        if pyxis:
            yield ok("containers", "srun has --container-image (pyxis)")
        elif image is None:
            yield skipped("containers", "srun has no --container-image (pyxis); plain processes are run")
        else:
            yield failed(
                "containers",
                f"{image} is named, and srun has no --container-image (pyxis)",
                "Ask for pyxis on this cluster, or leave the image out: then plain processes are run.",
            )
        if image is None or image.endswith(".sqsh"):
            return
        problem = squash_problem(self.profile)
        if problem is not None:
            yield failed("auto-squash", problem, "Complete the profile, or name a .sqsh file.")
        else:
            yield ok("auto-squash", f"{image} is imported below {self.fields.remote_job_dir}/containers")


def _sandbox(able: Isolation) -> Check:
    """Report how programs of graders are confined; evals without such programs need nothing of it."""
    whole = able.writes and able.read_only and able.processes and able.network == "namespace"
    return ok(
        "programs of graders",
        able.summary,
        "" if whole else "With user namespaces they would be confined: see docs/graders-files.md.",
    )


def _wandb(profile: Profile, environ: Mapping[str, str]) -> Check:
    project = profile.wandb.project
    said = f"project {project}" if project else "no [wandb] project in env.toml"
    from holdfast.export.wandb import detect

    if detect(environ).api_key is None:
        return skipped(
            "W&B", f"no login found; {said}", "Where results go there: run `wandb login`, or set WANDB_API_KEY."
        )
    return ok("W&B", f"login found; {said}")


def _await(slurm: Slurm, name: str, begun: float) -> JobState | None:
    """The job once it has ended, or as it is when time is up."""
    while True:
        found = slurm.jobs(names=[name])
        state = found[0] if found else None
        if state is None or not state.active or time.monotonic() - begun > JOB_SECONDS:
            return state
        time.sleep(0.5)


def _old_python(text: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", text)
    return found is None or (int(found[1]), int(found[2])) < (3, 11)


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it cannot be written"])[-1]


# One script for everything that is done with files, so that it takes one round trip.
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
