"""Evals from Python: the same names as in an eval file, and functions where the file names them."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.canonical import digest
from holdfast.display.text import Quiet
from holdfast.engine.options import Options
from holdfast.engine.run import Outcome, run_eval
from holdfast.errors import Interrupted, UsageError
from holdfast.formats import in_our_words
from holdfast.spec.document import Document, read_document
from holdfast.spec.grader_fields import TAKEN_NAMES
from holdfast.spec.load import build_eval
from holdfast.store.index import read_line
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from holdfast.display.types import Display
    from holdfast.spec.load import Eval
    from holdfast.spec.overrides import Override


@dataclass(frozen=True)
class Run:
    """A run as it is on disk after `evaluate`."""

    path: Path
    finished: bool
    metrics: dict[str, Any] | None
    """what `metrics.json` holds; None when the run is not finished"""
    exit_code: int
    """what the command would have returned: 0 finished, 1 gate not met, 3 not finished"""
    reason: str | None
    """why it is not finished"""

    @property
    def score(self) -> float | None:
        """The weighted mean over all graders."""
        return None if self.metrics is None else self.metrics["score"]

    def results(self) -> list[dict[str, Any]]:
        """One entry per trial, in the dataset's order, from `results.json`."""
        entries: list[dict[str, Any]] = msgspec.json.decode((self.path / "results.json").read_bytes())["trials"]
        return entries

    def outputs(self) -> Iterator[dict[str, Any]]:
        """The transcripts, in the order in which they finished."""
        for ref in RunDir(self.path).load(mend=False).outputs.values():
            yield msgspec.json.decode(read_line(ref))


def evaluate(
    eval_file: str | Path | None = None,
    *,
    target: Mapping[str, Any] | Callable[..., Any] | str | None = None,
    graders: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    runs_dir: str | Path | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    accept_errors: bool = False,
    skip_graders: bool = False,
    workers: int | None = None,
    display: Display | None = None,
    **fields: Any,
) -> Run:
    """Run an eval, or go on with it, and return the run.

    Give an eval file, or the keys of one as arguments (`name`, `dataset` or `samples`, `prompt`, `trials`, `limits` …),
    or both, the arguments laid over the file. `target` may be a function, or a model's name; `graders` may hold
    functions. They need a source file, since their code is part of the keys. Interrupt it as you like: the same
    call goes on. Runs are kept in `runs_dir`, else in $HOLDFAST_RUNS_DIR, else in ./runs.

    With `workers` the work is shared out among so many processes. They read the eval from the run directory, so its
    functions are named as in a file (`target={"python": "agent.py:reply"}`), not given.
    """
    if workers is not None:
        _refuse_workers(workers)
    options = Options(
        runs_dir=Path(runs_dir or os.environ.get("HOLDFAST_RUNS_DIR") or "runs"),
        fresh=fresh,
        retry_failed=retry_failed,
        accept_errors=accept_errors,
        skip_graders=skip_graders,
    )
    spec = _spec(eval_file, target, graders, fields)
    if workers is not None and spec.functions:
        raise UsageError(
            f"workers are processes of their own, and cannot be given {', '.join(spec.functions)}",
            remedy='Name functions as an eval file does: target={"python": "agent.py:reply"}, or leave workers out.',
        )
    shown = display or Quiet()
    if workers is None:
        outcome = _in_own_thread(lambda: run_eval(spec, options, shown), options)
    else:
        from holdfast.engine.crew import run_workers

        again = "the same call of holdfast.evaluate"
        outcome = _in_own_thread(lambda: run_workers(spec, options, workers, shown, command=again), options)
    if isinstance(outcome.reason, Interrupted):
        raise KeyboardInterrupt  # as Ctrl-C does elsewhere in Python; what finished is on disk
    if outcome.metrics is not None and spec.exports:
        from holdfast.export.exporting import export_finished

        def failed(message: str) -> None:
            warnings.warn(message, RuntimeWarning, stacklevel=3)

        export_finished(outcome.rundir, spec, lambda _name, _done: None, failed)
    reason = None if outcome.reason is None else str(outcome.reason)
    if outcome.metrics is None and reason is None and not skip_graders:
        left = outcome.plan.to_run + outcome.plan.to_grade
        reason = f"{left} of {outcome.plan.total} trials have errors; see {outcome.rundir.path / 'errors.jsonl'}"
    return Run(
        path=outcome.rundir.path,
        finished=outcome.metrics is not None,
        metrics=outcome.metrics,
        exit_code=outcome.exit_code,
        reason=reason,
    )


def _refuse_workers(workers: int) -> None:
    from holdfast.engine.crew import WORKER

    if workers < 1:
        raise UsageError(f"workers is {workers}; it is a number of processes, 1 or more")
    if WORKER in os.environ:
        raise UsageError(
            "a worker cannot start workers, and this is one, or was started by one: it may have imported your script",
            remedy='Put the call under `if __name__ == "__main__":`, or the function into a file of its own.',
        )


def _spec(
    eval_file: str | Path | None,
    target: Mapping[str, Any] | Callable[..., Any] | str | None,
    graders: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
    fields: dict[str, Any],
) -> Eval:
    functions: dict[str, Any] = {}
    document, folder = Document({}), Path.cwd()
    asked: dict[str, Any] = {}
    """what a file of another tool asks of the target, whichever it is"""
    if eval_file is not None:
        given: list[Override] = [] if target is None else [(("target",), _kind(target))]
        path = Path(eval_file)
        document, overrides = in_our_words(read_document(path), given)
        asked = {key[1]: value for key, value in overrides if key[0] == "target" and len(key) == 2}
        folder = path.resolve().parent
    data = {**document.data, **fields}
    if isinstance(data.get("dataset"), str | Path):
        data["dataset"] = {"path": str(data["dataset"])}
    if isinstance(target, str):
        data["target"] = {**(data.get("target") or {}), "model": target}
    elif callable(target):
        function = _given(target, functions)
        data["target"] = {"python": function.pop("function"), **function}
    elif target is not None:
        data["target"] = dict(target)
    if asked:
        data["target"] = {**asked, **data["target"]}
    if graders is not None:
        data["graders"] = [
            {"type": "python", "name": _name(grader), **_given(grader, functions)} if callable(grader) else dict(grader)
            for grader in graders
        ]
    return build_eval(replace(document, data=data), folder, functions, document.notices)


def _kind(target: Mapping[str, Any] | Callable[..., Any] | str) -> Mapping[str, Any]:
    """A target as far as it matters for reading a file that may name none."""
    return {"model": target} if isinstance(target, str) else {"python": ""} if callable(target) else target


def _name(function: Callable[..., Any]) -> str:
    """A function's name, or that of a callable object's class; `score` and the like mean something else already."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return f"{name}_function" if name in TAKEN_NAMES else name


def _given(function: Callable[..., Any], functions: dict[str, Any]) -> dict[str, Any]:
    """A function as an eval file would give it: file and name, and a version for what it carries along."""
    state = _carried(function)
    return {"function": _reference(function, functions), **({"version": digest(state)} if state else {})}


def _carried(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function brings beside its source: closed-over values, or the object whose method it is."""
    plain = inspect.unwrap(function)
    values: dict[str, Any] = {}
    owner = plain.__self__ if inspect.ismethod(plain) else None if inspect.isroutine(plain) else plain
    if owner is not None and not inspect.ismodule(owner):
        values |= {f"self.{name}": value for name, value in getattr(owner, "__dict__", {}).items()}
    code = getattr(plain, "__code__", None)
    for name, cell in zip(getattr(code, "co_freevars", ()), getattr(plain, "__closure__", None) or (), strict=True):
        with suppress(ValueError):  # not filled yet
            values[name] = cell.cell_contents
    values = {name: value for name, value in values.items() if not (callable(value) or inspect.ismodule(value))}
    if code is not None and "<" in code.co_qualname:
        values["code"] = _code_digest(code)  # a lambda's name does not tell it from the others of its file
    try:
        msgspec.json.encode(values)
    except (TypeError, ValueError, RecursionError):
        raise UsageError(
            f"{getattr(function, '__qualname__', function)} carries {', '.join(values)}, and a change of these could "
            "not be noticed",
            remedy="Give plain values (texts, numbers, lists), or a function that makes what it needs itself.",
        ) from None
    return values


def _code_digest(code: CodeType) -> str:
    constants = [_code_digest(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return digest([code.co_code.hex(), list(code.co_names), constants])


def _is_what_the_file_says(function: Callable[..., Any], file: str) -> bool:
    """Whether the code that would run is the code that is read for the key: a file may change after its import."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return True
    try:
        waiting = [compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)]
    except (OSError, SyntaxError, ValueError):
        return False
    while waiting:
        found = waiting.pop()
        if (found.co_qualname, found.co_code, found.co_names) == (code.co_qualname, code.co_code, code.co_names):
            constants = [[c for c in side.co_consts if not isinstance(c, CodeType)] for side in (found, code)]
            if constants[0] == constants[1]:
                return True
        waiting += [constant for constant in found.co_consts if isinstance(constant, CodeType)]
    return False


def _reference(function: Callable[..., Any], functions: dict[str, Any]) -> str:
    """A function by its file and name, as an eval file would give it."""
    if isinstance(function, functools.partial):
        raise UsageError(
            "a functools.partial has no source of its own, so a change of its arguments could not be noticed",
            remedy="Write a function that calls it.",
        )
    plain = inspect.unwrap(function)
    try:
        file = inspect.getsourcefile(plain if inspect.isroutine(plain) else type(plain))
    except (TypeError, OSError):  # made of C, or typed in
        file = None
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if file is None or not Path(file).exists():
        raise UsageError(
            f"{name} has no source file, so a change of it could not be noticed",
            remedy="Put the function into a .py file.",
        )
    if not _is_what_the_file_says(function, file):
        raise UsageError(
            f"{file} has changed since {name} was imported from it",
            remedy="Import it again (importlib.reload, or start Python anew), so that what runs is what is read.",
        )
    reference = base = f"{file}:{name.replace('.<locals>', '').replace('<lambda>', 'lambda_')}"
    number = 1
    while functions.setdefault(reference, function) is not function:  # two lambdas of one file, say
        number += 1
        reference = f"{base}_{number}"
    return reference


def _in_own_thread(run: Callable[[], Outcome], options: Options) -> Outcome:
    """Where an event loop is running already, as in a notebook, ours runs in a thread of its own."""
    import asyncio

    in_loop = False
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        in_loop = True
    if not in_loop:
        return run()
    result: list[Outcome | BaseException] = []

    def work() -> None:
        try:
            result.append(run())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=work, name="holdfast-evaluate")
    thread.start()
    try:
        thread.join()
    except BaseException:  # Ctrl-C in a notebook reaches us here; the run hears of it at its next look
        options.cancelled.set()
        thread.join()
        raise
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]
