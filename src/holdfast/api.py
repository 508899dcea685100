"""Evals from Python: the names of an eval file's keys, with functions in place of their names."""

from __future__ import annotations

import asyncio
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from holdfast.display.displays import display_for_python
from holdfast.engine.attached import WORKER
from holdfast.engine.run import run_eval
from holdfast.engine.session import Options
from holdfast.errors import Interrupted, UsageError
from holdfast.functions.callables import Callables, capture_block, capture_grader
from holdfast.report.exports import export_after_run
from holdfast.report.result import Run
from holdfast.spec.document import Document
from holdfast.spec.formats import folder_of, read_eval, to_native
from holdfast.spec.load import build_eval
from holdfast.spec.plugins import load_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.display.displays import Display
    from holdfast.report.outcome import Outcome
    from holdfast.spec.eval import Eval
    from holdfast.spec.load import Override

_RUN_WORKERS: Final = "holdfast.engine.local_workers:run_workers"


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
    or a model's name. `graders`, tools and the `responder` may be functions too, even ones defined in a notebook:
    their code is part of the keys. Interrupt the call whenever you like: the same call resumes. Runs are kept in
    `runs_dir`, else in $HOLDFAST_RUNS_DIR, else ./runs.

    `display` shows progress: "rich" (redrawn in place), "plain" (lines), "json" (events), "none", or a
    `holdfast.Display` of your own. The default is "rich" on a terminal, "plain" in a notebook, else "none".

    With `workers=N`, N processes share the work. They read the eval from the run directory, so its functions are
    named as in a file (`target={"python": "agent.py:reply"}`) instead of being passed.
    """
    options = _options(runs_dir, fresh, retry_failed, accept_errors, skip_graders)
    call = _Call.read(eval_file, target, graders, fields, options, workers, display)
    run = _run_beside_event_loop(call) if _event_loop_runs() else call.run()
    if run is None:
        raise KeyboardInterrupt  # as Ctrl-C does elsewhere in Python
    return run


async def evaluate_async(
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
    """Run an eval like `evaluate`, without blocking the caller's event loop.

    The run has a thread and an event loop to itself. Cancelling the call stops the run as a second Ctrl-C does:
    requests in flight are cancelled, everything that finished is on disk when the cancellation arrives, and the same
    call resumes.
    """
    options = _options(runs_dir, fresh, retry_failed, accept_errors, skip_graders)
    call = _Call.read(eval_file, target, graders, fields, options, workers, display)
    run = asyncio.ensure_future(asyncio.to_thread(call.run))
    cancelled: asyncio.CancelledError | None = None
    while not run.done():
        try:
            await asyncio.wait([run])
        except asyncio.CancelledError as error:
            cancelled = error
            options.cancelled.set()  # the run notices, and still has to release its lease
    if cancelled is not None:
        with suppress(Exception):  # how the run ended does not matter to a caller that cancelled it
            run.result()
        raise cancelled
    result = run.result()
    if result is None:
        raise asyncio.CancelledError
    return result


def _options(
    runs_dir: str | Path | None, fresh: bool, retry_failed: bool, accept_errors: bool, skip_graders: bool
) -> Options:
    return Options(
        runs_dir=Path(runs_dir or os.environ.get("HOLDFAST_RUNS_DIR") or "runs"),
        fresh=fresh,
        retry_failed=retry_failed,
        accept_errors=accept_errors,
        skip_graders=skip_graders,
        command="the same call of holdfast.evaluate",
        abandon_hint="; interrupt again to abandon them",
    )


class _Call(NamedTuple):
    """A call of `evaluate`, read and ready to run."""

    spec: Eval
    options: Options
    workers: int | None
    display: Display
    captured: Callables

    @classmethod
    def read(
        cls,
        eval_file: str | Path | None,
        target: Mapping[str, Any] | Callable[..., Any] | str | None,
        graders: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
        fields: dict[str, Any],
        options: Options,
        workers: int | None,
        display: str | Display | None,
    ) -> _Call:
        """Check the arguments of a call, and read its eval."""
        progress = display_for_python(display)
        if workers is not None:
            _check_workers(workers)
        captured = Callables()
        try:
            spec = _read_eval(eval_file, target, graders, fields, captured)
            if workers is not None:
                _refuse_functions(spec)
        except BaseException:
            captured.release()
            raise
        return cls(spec, options, workers, progress, captured)

    def run(self) -> Run | None:
        """Run the eval and export it; None if it was interrupted."""
        try:
            if self.workers is None:
                outcome = run_eval(self.spec, self.options, self.display)
            else:
                outcome = load_reference(_RUN_WORKERS)(self.spec, self.options, self.workers, self.display)
            if isinstance(outcome.reason, Interrupted):
                return None
            self._export(outcome)
            return self._result(outcome)
        finally:
            self.captured.release()

    def _export(self, outcome: Outcome) -> None:
        def warn(message: str) -> None:
            warnings.warn(message, RuntimeWarning, stacklevel=7)

        export_after_run(outcome.rundir, self.spec, lambda _: None, warn)

    def _result(self, outcome: Outcome) -> Run:
        reason = None if outcome.reason is None else str(outcome.reason)
        if outcome.metrics is None and reason is None and not self.options.skip_graders:
            unfinished = outcome.plan.to_run + outcome.plan.to_grade
            reason = (
                f"{unfinished} of {outcome.plan.total} trials have errors; see {outcome.rundir.path / 'errors.jsonl'}"
            )
        return Run(
            path=outcome.rundir.path,
            finished=outcome.metrics is not None,
            metrics=outcome.metrics,
            exit_code=outcome.exit_code,
            reason=reason,
        )


def _check_workers(workers: int) -> None:
    if workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers}")
    if WORKER in os.environ:
        raise UsageError(
            "workers cannot start workers (this process is a worker, or was started by one that imported your script)",
            remedy='Put the call under `if __name__ == "__main__":`, or the function into a file of its own.',
        )


def _refuse_functions(spec: Eval) -> None:
    if spec.functions:
        raise UsageError(
            f"functions cannot be passed to worker processes: {', '.join(spec.functions)}",
            remedy='Name functions as an eval file does: target={"python": "agent.py:reply"}, or leave workers out.',
        )


def _read_eval(
    eval_file: str | Path | None,
    target: Mapping[str, Any] | Callable[..., Any] | str | None,
    graders: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
    fields: dict[str, Any],
    captured: Callables,
) -> Eval:
    document, folder = Document({}), Path.cwd()
    target_keys: dict[str, Any] = {}
    """keys of the target that another tool's file sets for any target"""
    if eval_file is not None:
        overrides: list[Override] = [] if target is None else [(("target",), _target_kind(target))]
        written = read_eval(Path(eval_file))
        document, remaining = to_native(written, overrides)
        target_keys = {key[1]: value for key, value in remaining if key[0] == "target" and len(key) == 2}
        folder = folder_of(written)
    data = {**document.data, **fields}
    if isinstance(data.get("dataset"), str | Path):
        data["dataset"] = {"path": str(data["dataset"])}
    if isinstance(target, str):
        data["target"] = {**(data.get("target") or {}), "model": target}
    elif target is not None:
        data["target"] = capture_block(target, "python", captured, allow_class=True)
    if target_keys:
        data["target"] = {**target_keys, **data["target"]}
    if graders is not None:
        data["graders"] = [capture_grader(grader, captured) for grader in graders]
    for key in ("responder", "baseline"):
        if key in fields:
            data[key] = capture_block(fields[key], "python", captured, allow_class=key == "baseline")
    if "checkpoints" in fields:
        data["checkpoints"] = [
            {**checkpoint, "graders": [capture_grader(grader, captured) for grader in checkpoint.get("graders") or []]}
            for checkpoint in fields["checkpoints"]
        ]
    notices = (*document.notices, *captured.uncovered)
    return build_eval(replace(document, data=data), folder, captured.functions, notices)


def _target_kind(target: Mapping[str, Any] | Callable[..., Any] | str) -> Mapping[str, Any]:
    """Return the part of a target that is needed to read a file without one."""
    return {"model": target} if isinstance(target, str) else {"python": ""} if callable(target) else target


def _event_loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_beside_event_loop(call: _Call) -> Run | None:
    """Run in a thread, and block: this thread already has an event loop, as in a notebook."""
    with ThreadPoolExecutor(1, "holdfast-evaluate") as pool:
        run = pool.submit(call.run)
        try:
            try:
                return run.result()
            except KeyboardInterrupt:  # by Ctrl-C in a notebook, or its stop button
                call.options.finishing.set()
                return run.result()
        except KeyboardInterrupt:  # leaving the block waits for the run to end
            call.options.cancelled.set()
            raise
