"""Evals, graders and the command inside the test's own process: for all that needs no process of its own."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.apps.cli.main import main
from holdfast.data.dataset import Sample
from holdfast.engine.signals import NUMBERS, Signals
from holdfast.errors import AttemptError
from holdfast.graders.build import SlowChecks, build_graders, grader_identity, grader_places
from holdfast.graders.types import Case, Verdict
from holdfast.plan.identity import RunIdentity, identify
from holdfast.spec.load import load_eval, parse_override
from holdfast.store.blobs import Blobs
from holdfast.store.records import Output, Timing, Usage

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [
    {"id": "a", "question": "What is 1 + 1?", "expected": "2"},
    {"id": "b", "question": "What is 2 + 2?", "expected": "4"},
]
EVAL: dict[str, Any] = {
    "name": "e",
    "samples": ROWS,
    "target": {"model": "test-model", "base_url": "http://127.0.0.1:1/v1"},
    "prompt": "{{ question }}",
    "graders": [{"type": "exact"}],
}


def write_spec(folder: Path, **keys: Any) -> Path:
    """An eval file; a key given as None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = {key: value for key, value in {**EVAL, **keys}.items() if value is not None}
    path = folder / "eval.yaml"
    path.write_text(json.dumps(spec, indent=1))  # JSON is YAML
    return path


def load(folder: Path, *overrides: str, **keys: Any) -> Any:
    """Load the eval of such a file."""
    return load_eval(write_spec(folder, **keys), [parse_override(text) for text in overrides])


def who(folder: Path, *overrides: str, **keys: Any) -> RunIdentity:
    """Load an eval, read its data and make its keys."""
    return identify(load(folder, *overrides, **keys))


def identities(spec: Any) -> list[dict[str, Any]]:
    """The identities of an eval's graders, in their order."""
    return [grader_identity(place, spec) for place in grader_places(spec)]


def write_rows(path: Path, rows: list[Any]) -> Path:
    """A JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def output_of(text: str, **fields: Any) -> Output:
    """A finished trial that said so."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    plain = {
        "key": "sha256:k",
        "sample": "s",
        "trial": 1,
        "attempt": 1,
        "messages": messages,
        "output": text,
        "turns": 1,
        "stop": "stop",
        "answer": "whole",
        "usage": Usage(),
        "timing": Timing(0.0, 1.0),
        "digest": "sha256:d",
    }
    return Output(**{**plain, **fields})


def grade(
    folder: Path,
    block: dict[str, Any],
    answer: str,
    /,
    fields: dict[str, Any] | None = None,
    files: dict[str, str] | None = None,
    **row: Any,
) -> Verdict | AttemptError:
    """Return a grader's verdict on an answer, or the AttemptError that it raises.

    `said` are further fields of the output, `files` the files of the trial's workspace.
    """
    workspace = None if files is None else {}
    keys: dict[str, Any] = {"prompt": "hello", "graders": [block], "workspace": workspace}
    if block["type"] == "likelihood":
        keys |= {"continuations": "endings", "target": {"model": "m", "api": "completions"}}
    spec = load(folder, samples=[row or {"expected": "x"}], **keys)
    (grader,) = build_graders(spec)
    blobs = Blobs(folder / "blobs")
    stored = {} if files is None else {"files": {path: blobs.keep(text.encode()) for path, text in files.items()}}
    case = Case(Sample("s", row, "sha256:0", "here"), output_of(answer, **{**stored, **(fields or {})}), blobs)

    async def verdict() -> Verdict:
        return grader.check(case) if hasattr(grader, "check") else await grader.judge(case)

    async def judged() -> Verdict:
        elsewhere = SlowChecks()
        try:
            async with grader:
                return await elsewhere.complete(verdict)
        finally:
            await elsewhere.close()

    try:
        return asyncio.run(judged())
    except AttemptError as error:
        return error


class Ended(NamedTuple):
    """Result of a command."""

    code: int
    out: str
    err: str


def command(monkeypatch: Any, capsys: Any, cwd: Path, *arguments: Any) -> Ended:
    """Run the command in this process, as a user in `cwd` types it."""
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
    capsys.readouterr()
    handlers, thresholds = {number: signal.getsignal(number) for number in NUMBERS}, gc.get_threshold()
    try:
        main()
    except SystemExit as leaving:
        captured = capsys.readouterr()
        return Ended(int(leaving.code or 0), captured.out, captured.err)
    finally:  # what a command may leave behind, since it ends its process
        for number, handler in handlers.items():
            signal.signal(number, handler)
        Signals.current, Signals.hard = None, False
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    raise AssertionError("main() ends the process")
