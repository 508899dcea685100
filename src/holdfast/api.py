"""Evals from Python: the same names as in an eval file, and functions where the file names them."""

from __future__ import annotations

import inspect
import os
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.canonical import digest
from holdfast.display.choice import display_for_python
from holdfast.engine.options import Options
from holdfast.engine.session import run_eval
from holdfast.errors import Interrupted, UsageError
from holdfast.export.result import Run
from holdfast.formats import to_native
from holdfast.functions.given import Given
from holdfast.spec.document import Document, read_document
from holdfast.spec.grader_schema import TAKEN_NAMES
from holdfast.spec.load import build_eval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.display.types import Display
    from holdfast.report.outcome import Outcome
    from holdfast.spec.load import Eval
    from holdfast.spec.overrides import Override


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
    display: Literal["rich", "plain", "json", "none"] | Display | None = None,
    **fields: Any,
) -> Run:
    """Run an eval, or resume it, and return the run.

    Pass an eval file, or the keys of one as arguments (`name`, `dataset` or `samples`, `prompt`, `trials`, `limits` …),
    or both: arguments override the file. `target` may be a function, an object that can be called, the class of one,
    or a model's name. `graders`, tools and the `responder` may be functions too, also such as are defined in a
    notebook: their code is part of the keys. Interrupt it whenever you like: the same call resumes. Runs are kept in
    `runs_dir`, else in $HOLDFAST_RUNS_DIR, else ./runs.

    `display` shows progress: "rich" (redrawn in place), "plain" (lines), "json" (events), "none", or a
    `holdfast.Display` of your own. The default is "rich" on a terminal, "plain" in a notebook, else "none".

    With `workers` that many processes share the work. They read the eval from the run directory, so its functions are
    named as in a file (`target={"python": "agent.py:reply"}`) instead of being passed.
    """
    shown = display_for_python(display)
    if workers is not None:
        _refuse_workers(workers)
    options = Options(
        runs_dir=Path(runs_dir or os.environ.get("HOLDFAST_RUNS_DIR") or "runs"),
        fresh=fresh,
        retry_failed=retry_failed,
        accept_errors=accept_errors,
        skip_graders=skip_graders,
        command="the same call of holdfast.evaluate",
    )
    given = Given()
    try:
        return _run(_spec(eval_file, target, graders, fields, given), options, workers, shown)
    finally:
        given.release()


def _run(spec: Eval, options: Options, workers: int | None, shown: Display) -> Run:
    if workers is not None and spec.functions:
        raise UsageError(
            f"workers are processes of their own, and cannot be given {', '.join(spec.functions)}",
            remedy='Name functions as an eval file does: target={"python": "agent.py:reply"}, or leave workers out.',
        )
    if workers is None:
        outcome = _in_own_thread(lambda: run_eval(spec, options, shown), options)
    else:
        from holdfast.engine.local_workers import run_workers

        outcome = _in_own_thread(lambda: run_workers(spec, options, workers, shown), options)
    if isinstance(outcome.reason, Interrupted):
        raise KeyboardInterrupt  # as Ctrl-C does elsewhere in Python; what finished is on disk
    from holdfast.export.after_run import export_after_run

    def warn(message: str) -> None:
        warnings.warn(message, RuntimeWarning, stacklevel=5)

    export_after_run(outcome.rundir, spec, lambda _: None, warn)
    reason = None if outcome.reason is None else str(outcome.reason)
    if outcome.metrics is None and reason is None and not options.skip_graders:
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
    from holdfast.engine.local_workers import WORKER

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
    given: Given,
) -> Eval:
    document, folder = Document({}), Path.cwd()
    asked: dict[str, Any] = {}
    """what a file of another tool asks of the target, whichever it is"""
    if eval_file is not None:
        overrides: list[Override] = [] if target is None else [(("target",), _kind(target))]
        path = Path(eval_file)
        document, left = to_native(read_document(path), overrides)
        asked = {key[1]: value for key, value in left if key[0] == "target" and len(key) == 2}
        folder = path.resolve().parent
    data = {**document.data, **fields}
    if isinstance(data.get("dataset"), str | Path):
        data["dataset"] = {"path": str(data["dataset"])}
    if isinstance(target, str):
        data["target"] = {**(data.get("target") or {}), "model": target}
    elif target is not None:
        data["target"] = _block(target, "python", given, classes=True)
    if asked:
        data["target"] = {**asked, **data["target"]}
    if graders is not None:
        data["graders"] = [_grader(grader, given) for grader in graders]
    for key in ("responder", "baseline"):
        if key in fields:
            data[key] = _block(fields[key], "python", given, classes=key == "baseline")
    if "checkpoints" in fields:
        data["checkpoints"] = [
            {**checkpoint, "graders": [_grader(grader, given) for grader in checkpoint.get("graders") or []]}
            for checkpoint in fields["checkpoints"]
        ]
    notices = (*document.notices, *given.uncovered)
    return build_eval(replace(document, data=data), folder, given.functions, notices)


def _grader(grader: Mapping[str, Any] | Callable[..., Any], given: Given) -> Any:
    named = {"type": "python", "name": _name(grader)} if callable(grader) else {}
    return {**named, **_block(grader, "function", given)}


def _block(value: Any, key: str, given: Given, *, classes: bool = False) -> Any:
    """A block as an eval file would have it: references in the place of functions, and a version for what they carry.

    A function by itself stands for the block that names it under `key`. With `classes` it may be a class there.
    """
    if callable(value):
        value = {key: value}
    if not isinstance(value, Mapping):
        return value  # reading the eval says what is wrong with it
    block: dict[str, Any] = {}
    marks: list[str] = []

    def taken(inner: Any, *, or_class: bool = False) -> Any:
        if inspect.isclass(inner) and not or_class:
            raise UsageError(
                f"{inner.__qualname__} is a class, and only a target can be one", remedy="Pass an object of that class."
            )
        if callable(inner):
            inner, mark = given.take(inner)
            marks.extend([] if mark is None else [mark])
        return inner

    for name, inner in value.items():
        if name == "tools" and isinstance(inner, list | tuple):
            block[name] = [_block(tool, "python", given) for tool in inner]
        elif name == "state" and isinstance(inner, Mapping):
            block[name] = {hook: taken(function) for hook, function in inner.items()}
        else:
            block[name] = taken(inner, or_class=classes and name == key)
    if marks:
        own = block.get("version")
        block["version"] = marks[0] if len(marks) == 1 and own is None else digest([own, *marks])
    return block


def _kind(target: Mapping[str, Any] | Callable[..., Any] | str) -> Mapping[str, Any]:
    """A target as far as it matters for reading a file that may name none."""
    return {"model": target} if isinstance(target, str) else {"python": ""} if callable(target) else target


def _name(function: Callable[..., Any]) -> str:
    """A function's name, or that of a callable object's class; `score` and the like mean something else already."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return f"{name}_function" if name in TAKEN_NAMES else name


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
