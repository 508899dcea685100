"""Kill `holdfast eval` with SIGKILL again and again, and count what is lost, left behind or done twice.

    python bench/kills.py [--kills 1000] [--lanes 2] [--seed 1]

Two evals take turns. Each is killed with its whole process group at a random moment and started again until it is
finished; then it begins again in an empty directory, until there were as many kills as asked for.

programs  Conversations of two turns with a program in a workspace. It asks its model through the recording proxy, runs
          commands in sessions of their own that write to the workspace by absolute path, and leaves a detached process
          behind.
tools     Conversations of two turns with a model that calls a tool with side effects (`replay: never`) and the tool of
          an MCP server. A trial that stops as uncertain is settled as a person would do it: by looking at the orders.

After each kill an independent reader of the journals checks that no earlier line is gone, and that no process is left
that carries this eval's mark in its environment. A finished run must have the same answers, files and numbers as a run
that was never killed. Prints a table, and exits with 1 unless everything is 0 that should be. Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from run import HERE, HOLDFAST, PYTHON, compile_first

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES: Final = 12
CONCURRENCY: Final = 4
PATIENCE: Final = 10.0
"""seconds in which the processes of a killed eval must be gone"""
MARK: Final = "HOLDFAST_BENCH_KILLS"
"""the environment variable that all processes of an eval have"""

AGENT: Final = """
import http.client, json, os, subprocess, sys, urllib.parse
url = urllib.parse.urlparse(os.environ["OPENAI_BASE_URL"])
notes = os.environ["HOLDFAST_WORKSPACE"] + "/notes.txt"

def ask(text):
    connection = http.client.HTTPConnection(url.hostname, url.port)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
    connection.request("POST", url.path + "/chat/completions", body, {"Content-Type": "application/json"})
    return json.load(connection.getresponse())["choices"][0]["message"]["content"]

def build(line):  # as coding agents run the commands of their shell tools
    subprocess.run(["sh", "-c", f"sleep 0.1; echo {line} >> {notes}"], start_new_session=True, check=True)

prompt = sys.argv[1]
build("first")
answer = ask(prompt + " first")
build(answer.split()[-1])
late = f"sleep 20; echo late >> {os.environ['ESCAPED']}"
subprocess.Popen(["sh", "-c", late], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
answer = ask(prompt + " second")
build(answer.split()[-1])
print(" ".join(open(notes).read().split()))
"""

SHOP: Final = '''
import os, time

def order(item: str) -> str:
    """Order an item."""
    time.sleep(0.03)
    ledger = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(ledger, (item + "\\n").encode())
    os.close(ledger)
    time.sleep(0.03)
    return "ordered " + item
'''

STORE: Final = '''
import subprocess
from plain_mcp import MCPServer

subprocess.Popen(["sleep", "60"], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
server = MCPServer("store")

@server.tool()
def pack(item: str) -> str:
    """Pack an item."""
    return "packed " + item

server.run()
'''


@dataclass
class Counts:
    """Count the events of a lane."""

    kills: int = 0
    runs: int = 0
    lost: int = 0
    """lines that were in a journal before a kill, and not after it"""
    orphans: int = 0
    """processes that outlived a killed eval"""
    twice: int = 0
    """side effects that happened more than once"""
    missing: int = 0
    """side effects that a finished run lacks"""
    repeated: int = 0
    """model calls in excess of a run that was never killed"""
    excess: int = 0
    """among them, calls beyond those that can have been in flight"""
    different: int = 0
    """finished runs whose answers, files or numbers differ from a run that was never killed"""
    settled: int = 0
    """trials that a person had to settle"""
    slowest: float = 0.0
    """seconds until the last process of a killed eval was gone, at most"""

    def __add__(self, other: Counts) -> Counts:
        total = Counts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Counts)))
        total.slowest = max(self.slowest, other.slowest)
        return total


class Case:
    """One of the two evals, in a folder of its own, with a server of its own."""

    def __init__(self, kind: str, folder: Path, base_url: str) -> None:
        self.kind = kind
        self.folder = folder
        self.base_url = base_url
        self.mark = f"{os.getpid()}-{folder.name}"
        self.ledger = folder / "ledger.txt"
        self.escaped = folder / "escaped.txt"
        folder.mkdir(parents=True)
        common = {
            "schemaVersion": "1.0",
            "name": kind,
            "samples": [{"id": f"s{number}"} for number in range(SAMPLES)],
            "prompt": "{{ id }} begins",
            "follow_ups": ["{{ id }} goes on"],
            "limits": {"concurrency": CONCURRENCY},
        }
        if kind == "programs":
            (folder / "agent.py").write_text(AGENT)
            (folder / "check.sh").write_text('grep -q "^second" notes.txt && test "$(wc -l < notes.txt)" = 6\n')
            own = {
                "target": {"command": [PYTHON, "-S", "agent.py", "{{ prompt }}"], "base_url": base_url},
                "workspace": {},
                "graders": [
                    {"name": "answer", "type": "text", "regex_match": ["^first first second first first second$"]},
                    {"name": "notes", "type": "program", "command": "sh", "args": ["check.sh"]},
                ],
            }
        else:
            (folder / "shop.py").write_text(SHOP)
            (folder / "store.py").write_text(STORE)
            shutil.copy(HERE.parent / "tests" / "support" / "plain_mcp.py", folder)
            own = {
                "target": {
                    "model": "m",
                    "base_url": base_url,
                    "tools": [
                        {"python": "shop.py:order", "replay": "never"},
                        {"mcp": {"command": [PYTHON, "-S", "store.py"]}},
                    ],
                },
                "graders": [{"name": "answer", "type": "text", "contains": "packed {{ id }} goes on 1"}],
            }
        (folder / "eval.yaml").write_text(json.dumps(common | own))  # JSON is YAML
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI_")} | {
            MARK: self.mark,
            "LEDGER": str(self.ledger),
            "ESCAPED": str(self.escaped),
        }

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """Start the eval, or resume it, in a process group of its own."""
        command = [HOLDFAST, *(more or ("eval", "eval.yaml")), "--display", "plain"]
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def begin_again(self) -> None:
        """Remove the run and what it has left."""
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
        for path in (self.ledger, self.escaped, self.folder / "log.txt"):
            path.unlink(missing_ok=True)
        self._call("/reset", b"{}")

    @property
    def run(self) -> Path | None:
        """The run directory."""
        return next((path.parent for path in (self.folder / "runs").glob("*/*/manifest.json")), None)

    def requests(self) -> int:
        """Number of model calls that the server has got."""
        return self._call("/stats")["requests"]

    def lines(self) -> Counter[bytes]:
        """Return all whole lines of the journals."""
        if self.run is None:
            return Counter()
        journals = [path for path in self.run.rglob("*.jsonl") if path.parent == self.run or "workers" in path.parts]
        lines = (line for path in journals for line in path.read_bytes().splitlines(keepends=True))
        return Counter(line for line in lines if line.endswith(b"\n"))

    def result(self) -> Any:
        """Return what must be the same however often the run was killed."""
        assert self.run is not None
        outputs = [json.loads(line) for line in (self.run / "outputs.jsonl").read_bytes().splitlines()]
        answers = {each["sample"]: [each[key] for key in ("messages", "output", "turns", "stop")] for each in outputs}
        files = {each["sample"]: each.get("files") for each in outputs}
        metrics = json.loads((self.run / "metrics.json").read_bytes())
        del metrics["timing"]
        return answers, files, metrics, len(outputs)

    def orders(self) -> Counter[str]:
        """Return the side effects."""
        return Counter(self.ledger.read_text().splitlines()) if self.ledger.exists() else Counter()

    def survivors(self) -> list[int]:
        """Return the processes that carry the mark."""
        wanted, found = f"{MARK}={self.mark}".encode(), []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (place / "environ").read_bytes().split(b"\0"):
                    state = (place / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found.append(int(place.name))
            except OSError:  # it has ended
                continue
        return found

    def _call(self, path: str, data: bytes | None = None) -> Any:
        import urllib.request

        with urllib.request.urlopen(self.base_url.removesuffix("/v1") + path, data, timeout=60) as response:
            return json.load(response)


class Lane:
    """Kills one eval until there were enough kills."""

    def __init__(self, case: Case, seed: str, kills: int) -> None:
        self._case = case
        self._chance = random.Random(seed)
        self._kills = kills
        self._settlement: tuple[str, ...] = ()
        """the command that settles what stopped as uncertain, instead of the eval's own"""
        self.counts = Counts()

    def work(self) -> Counts:
        """Run, kill and compare."""
        case, counts = self._case, self.counts
        case.begin_again()
        began = time.monotonic()
        if (code := case.start().wait()) != 0:
            raise SystemExit(f"{case.kind}: an eval that nobody killed ended with {code}: see {case.folder}/log.txt")
        whole, seconds = case.result(), time.monotonic() - began
        calls, orders = case.requests(), case.orders()
        self._look_for_survivors()
        while counts.kills < self._kills:
            kills_before = counts.kills
            case.begin_again()
            self._finish(seconds)
            counts.runs += 1
            counts.different += case.result() != whole
            made = case.orders()
            counts.twice += sum((made - orders).values())
            counts.missing += sum((orders - made).values())
            repeated = case.requests() - calls
            counts.repeated += repeated
            counts.excess += max(0, repeated - CONCURRENCY * (counts.kills - kills_before))
            if case.escaped.exists():
                counts.orphans += len(case.escaped.read_text().splitlines())
        return counts

    def _finish(self, seconds: float) -> None:
        """Start the eval, kill it, and start it again, until it is finished."""
        case, counts = self._case, self.counts
        before: Counter[bytes] = Counter()
        while True:
            process = case.start(*self._settlement)
            self._settlement = ()
            # A fifth of the kills hit the start; the others are spread over a whole run.
            wait = self._chance.uniform(0, 0.4 if self._chance.random() < 0.2 else seconds)
            try:
                code = process.wait(wait if counts.kills < self._kills else None)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                counts.kills += 1
            else:
                if code == 0:
                    return
                if not self._settle():
                    raise SystemExit(f"{case.kind} ended with {code}: see {case.folder}/log.txt")
            self._look_for_survivors()
            after = case.lines()
            counts.lost += sum((before - after).values())
            before = after

    def _look_for_survivors(self) -> None:
        """Wait until no process of the eval is left, and count and end those that stay."""
        began = time.monotonic()
        while (left := self._case.survivors()) and time.monotonic() - began < PATIENCE:
            time.sleep(0.02)
        self.counts.slowest = max(self.counts.slowest, time.monotonic() - began)
        self.counts.orphans += len(left)
        for process in left:
            os.kill(process, signal.SIGKILL)

    def _settle(self) -> bool:
        """Settle the trials that stopped as uncertain; return False if there were none.

        An order that is in the ledger has happened. Each is settled by a command that continues the run, and may be
        killed like any other.
        """
        case = self._case
        last: dict[tuple[Any, ...], dict[str, Any]] = {}
        for line in case.lines():  # in the order in which they were written
            if (step := json.loads(line)).get("kind") in ("intent", "tool", "settle"):
                last[step["sample"], step["turn"], step["request"], step["nth"]] = step
        cut_off = [step for step in last.values() if step["kind"] == "intent"]
        settlements = []
        for step in cut_off:
            item = step["response"]["arguments"]["item"]
            decision = f'happened:"ordered {item}"' if case.orders()[item] else "again"
            settlements += ["--settle", f"{step['sample']}/{step['trial']}={decision}"]
        self.counts.settled += len(cut_off)
        self._settlement = ("resume", str(case.run), *settlements) if cut_off else ()
        return bool(cut_off)


@contextmanager
def serving(*settings: str) -> Iterator[str]:
    """Serve a model, and yield its base URL."""
    command = [PYTHON, "-m", "tests.support.server", "latency=0.05", *settings]
    process = subprocess.Popen(command, cwd=HERE.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().decode().split()[1]
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def main() -> None:
    """Kill, count and print."""
    parser = argparse.ArgumentParser(description="Kill evals with programs and tools, and count what goes wrong.")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--lanes", type=int, default=2, help="evals at the same time; half of them of each kind")
    parser.add_argument("--kind", choices=("programs", "tools"), help="one of the two evals only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the runs and their logs in this folder")
    options = parser.parse_args()
    compile_first()
    kinds = [options.kind] if options.kind else ["programs", "tools"]
    with ExitStack() as stack:
        root = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-kills-")))
        lanes = []
        count = max(options.lanes, len(kinds))
        for number in range(count):
            kind = kinds[number % len(kinds)]
            base_url = stack.enter_context(serving(*(["tool_calls=2"] if kind == "tools" else [])))
            case = Case(kind, root.resolve() / f"{kind}-{number}", base_url)
            lanes.append(
                (kind, Lane(case, f"{options.seed} {number}", -(-options.kills // max(options.lanes, len(kinds)))))
            )
        with ThreadPoolExecutor(len(lanes)) as pool:
            results = [(kind, pool.submit(lane.work)) for kind, lane in lanes]
        totals: dict[str, Counts] = {}
        for kind, result in results:
            totals[kind] = totals.get(kind, Counts()) + result.result()
    for each in fields(Counts):
        row = [getattr(total, each.name) for total in totals.values()]
        print(f"{each.name:>10} ", *(f"{value:>10.3g}" for value in row))
    bad = ("lost", "orphans", "twice", "missing", "excess", "different")
    sys.exit(any(getattr(total, name) for total in totals.values() for name in bad))


if __name__ == "__main__":
    main()
