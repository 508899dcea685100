"""Power loss, for real: is every output that was counted there after the cut?

    bench/power_loss.sh [--rounds 5] [--seed N]

A kernel runs as a process; its root is this machine's `/`, read-only, so that the same Python runs in it; its disk is
an ext4 image. Inside, the real `holdfast eval` works on that disk. Its events (`--display json`) go to a file of the
host, so what was counted is known whatever happens to the guest. At a random moment the kernel is killed: its cache
is gone, and only what had reached the disk stays. Then the image is mounted here and every output and grade that had
been counted is looked for, with a sound checksum. The next round goes on with the same disk. At the end the run is left
to finish, and its numbers are checked.

The control is the same command with all syncs switched off, on a disk of its own: there something must be missing, or
the check would prove nothing.

What this cannot show: a disk that lies about its own cache, or that reorders what it was given.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.store.lines import scan

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
ROWS_PER_ROUND = 1500
BOOT_SECONDS = 120.0
FINISH_SECONDS = 900.0
JOURNALS = {"output": "outputs.jsonl", "grade": "grades.jsonl"}
"""the event that counts a record, and the file that must then hold it"""

Records = dict[str, set[str]]
"""samples by kind of event"""


class Survivors(NamedTuple):
    """The records on a disk after a power cut."""

    records: Records
    unsound: int
    """lines that are torn or damaged; nobody counted them"""
    repeated: int
    """outputs that are there twice"""


class Machine:
    """A guest with its disk, and a folder that it shares with the host."""

    def __init__(self, folder: Path, rows: int, *, synced: bool) -> None:
        self._disk, self._share, self._place = folder / "disk", folder / "share", folder / "mounted"
        self._round = 0
        self._share.mkdir(parents=True)
        self._place.mkdir()
        with self._disk.open("wb") as file:
            file.truncate(512 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", self._disk], check=True)
        shutil.copy(HERE / "power" / "agent.py", self._share)
        if not synced:
            shutil.copy(HERE / "power" / "nosync.py", self._share / "sitecustomize.py")
        with (self._share / "data.jsonl").open("w") as file:
            for number in range(rows):
                expected = f"question {number}" if number % 2 == 0 else "something else"
                row = {"id": f"s{number}", "question": f"question {number}", "expected": expected}
                file.write(json.dumps(row) + "\n")
        spec = {
            "name": "power",
            "dataset": {"path": "data.jsonl"},
            "target": {"python": "agent.py:reply"},
            "prompt": "{{ question }}",
            "graders": [{"type": "exact"}],
            "limits": {"concurrency": 16},
        }
        (self._share / "power.yaml").write_text(json.dumps(spec))  # JSON is YAML
        environment = {
            "PYTHON": sys.executable,
            "PYTHONPATH": ":".join([*([] if synced else ["/media"]), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/run",
            "TMPDIR": "/run",
        }
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()]
        (self._share / "environment.sh").write_text("".join(lines))

    @property
    def _events(self) -> Path:
        return self._share / f"events-{self._round}.jsonl"

    @contextmanager
    def _on(self) -> Iterator[subprocess.Popen[bytes]]:
        """The guest at work. Leaving cuts its power."""
        self._round += 1
        self._events.touch()
        (self._share / "exit").unlink(missing_ok=True)
        (self._share / "command.sh").write_text(
            'cd /media && exec "$PYTHON" -m holdfast eval power.yaml --runs-dir /mnt/runs --display json '
            f">/media/said-{self._round} 2>>/media/{self._events.name}\n"
        )
        kernel = ["linux.uml", "mem=512M", "rootfstype=hostfs", "rootflags=/", "ro", f"init={HERE}/power/guest.sh"]
        devices = [f"ubd0={self._disk}", "con=null", "con0=fd:0,fd:1", "quiet", "loglevel=3"]
        names = [f"share={self._share}", f"umid=power-{os.getpid()}", f"uml_dir={self._share}/"]
        with (self._share / "console").open("ab") as console:
            guest = subprocess.Popen(
                [*kernel, *devices, *names],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        try:
            yield guest
        finally:
            with suppress(ProcessLookupError):
                os.killpg(guest.pid, signal.SIGKILL)
                guest.wait()
                end = time.monotonic() + 5
                while time.monotonic() < end:  # its helpers, one of which writes the disk, are gone a moment later
                    os.killpg(guest.pid, 0)
                    time.sleep(0.01)
            guest.wait()

    def cut(self, moment: float) -> bool:
        """Run until so many seconds after the first record was counted. False when it was finished before."""
        with self._on() as guest:
            end = time.monotonic() + BOOT_SECONDS
            while b'"event":"output"' not in self._events.read_bytes():
                if guest.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the guest did not get to work\n{self._said()}")
                time.sleep(0.01)
            with suppress(subprocess.TimeoutExpired):
                guest.wait(moment)
            return guest.poll() is None

    def finish(self) -> None:
        """Run to the end."""
        with self._on() as guest:
            guest.wait(FINISH_SECONDS)
        code = (self._share / "exit").read_text().strip()
        if code != "0":
            raise SystemExit(f"the eval ended with {code}\n{self._said()}")

    def _said(self) -> str:
        names = [f"said-{self._round}", self._events.name, "console"]
        return "\n".join((self._share / name).read_text(errors="replace")[-2000:] for name in names)

    def counted(self) -> Records:
        """Return the records that were counted so far, in all rounds."""
        records: Records = {kind: set() for kind in JOURNALS}
        for path in self._share.glob("events-*.jsonl"):
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n") and (event := json.loads(line))["event"] in records:
                    records[event["event"]].add(event["sample"])
        return records

    @contextmanager
    def _mounted(self) -> Iterator[Path]:
        """The eval's runs on the guest's disk, as they are after a cut."""
        subprocess.run(["mount", "-o", "loop", self._disk, self._place], check=True)
        try:
            yield self._place / "runs" / "power"
        finally:
            subprocess.run(["umount", self._place], check=True)

    def survivors(self) -> Survivors:
        """Return the sound records on the disk."""
        records: Records = {kind: set() for kind in JOURNALS}
        unsound, keys = 0, Counter[str]()
        with self._mounted() as runs:
            for kind, name in JOURNALS.items():
                for line in (line for path in runs.rglob(name) for line in scan(path)):
                    if not line.sound:
                        unsound += 1
                        continue
                    record = json.loads(line.data)
                    records[kind].add(record["sample"])
                    keys[record["key"]] += kind == "output"
        return Survivors(records, unsound, sum(count - 1 for count in keys.values() if count > 1))

    def numbers(self) -> dict[str, object]:
        """`metrics.json` of the finished run."""
        with self._mounted() as runs:
            (path,) = runs.glob("*/metrics.json")
            metrics: dict[str, object] = json.loads(path.read_text())
            return metrics


def look(machine: Machine, title: str) -> int:
    """Compare the counted records with the disk, and return how many are missing."""
    counted, survivors = machine.counted(), machine.survivors()
    missing = {kind: len(counted[kind] - survivors.records[kind]) for kind in JOURNALS}
    parts = [f"{len(counted[kind]):,} {kind}s counted, {missing[kind]:,} missing" for kind in JOURNALS]
    print(f"{title}: {'; '.join(parts)}; {survivors.unsound} torn, {survivors.repeated} repeated", flush=True)
    return sum(missing.values())


def main() -> int:
    """The rounds, the end, and the control."""
    parser = argparse.ArgumentParser(description="Cut the power under a running eval and count what is left.")
    parser.add_argument("--rounds", type=int, default=5, help="how often the power is cut")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of the moments of the cuts")
    options = parser.parse_args()
    moments = random.Random(options.seed)
    rows = ROWS_PER_ROUND * (options.rounds + 1)
    print(f"{options.rounds} cuts, {rows:,} samples, --seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-power-") as name:
        machine = Machine(Path(name) / "synced", rows, synced=True)
        missing = 0
        for number in range(1, options.rounds + 1):
            moment = moments.uniform(0.2, 4.0)
            if not machine.cut(moment):
                print(f"the run was finished before cut {number}")
                break
            missing += look(machine, f"cut {number}, {moment:.2f} s after the first output")
        machine.finish()
        missing += look(machine, "left to finish")
        metrics = machine.numbers()
        whole = (metrics["outputs"], metrics["coverage"], metrics["score"]) == (rows, 1.0, 0.5)
        print(f"metrics.json: {metrics['outputs']:,} outputs, coverage {metrics['coverage']}, score {metrics['score']}")

        control = Machine(Path(name) / "control", rows, synced=False)
        control.cut(2.0)
        lost = look(control, "control, the same with syncs switched off")
    if missing or not whole:
        print("NOT: something that was counted is gone, or the numbers are wrong")
    if not lost:
        print("NOT: the control lost nothing, so the check proves nothing")
    if missing or not whole or not lost:
        return 1
    print("ok: every output and every grade that was counted is there; without syncs they are not")
    return 0


if __name__ == "__main__":
    sys.exit(main())
