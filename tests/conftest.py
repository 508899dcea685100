"""Fixtures, settings and marks of all tests."""

import gc
import os
import shutil
from collections import defaultdict
from collections.abc import Generator, Iterator
from inspect import iscoroutinefunction
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from tests.support.forking import STARTED, start_warm_process
from tests.support.invocations import invocation
from tests.support.nat import nat
from tests.support.running import HOME, Server, holdfast, run_dir, server, write_eval
from tests.support.sharing import fill_once
from tests.support.slurm import own_slurm, own_sshd, slurm, sshd, stop_shared_lab, transport

__all__ = ["fill_once", "invocation", "nat", "own_slurm", "own_sshd", "slurm", "sshd", "transport"]

# A loaded machine is slow, not wrong.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

os.environ["HOLDFAST_HOME"] = str(HOME)  # nothing is written to the home directory of whoever runs the tests


def pytest_configure(config: pytest.Config) -> None:
    """Start the process that forks commands before those that run the tests, which share it."""
    gc.disable()  # until all tests are collected: hardly anything of that is garbage
    if config.getoption("numprocesses", None):
        start_warm_process()


@pytest.fixture(scope="module")
def calm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the uninterrupted run of the module's eval (its `KEYS`)."""
    folder = tmp_path_factory.mktemp("calm")
    with server() as running:
        holdfast("eval", write_eval(folder, running.base_url, **request.module.KEYS), cwd=folder)
    return run_dir(folder)


@pytest.fixture
def provider() -> Iterator[Server]:
    """Start a server for one test."""
    with server() as running:
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they use, so that `-m "not slurm"` and `-m "not faults"` select the rest.

    Tests outside tests/faults that kill a process or run it under strace are marked where they are written.
    """
    waiting, modules = [], defaultdict(list)
    for item in items:
        if {"own_slurm", "own_sshd", "slurm", "sshd", "transport"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slurm")
            waiting.append(item)
        else:
            modules[item.path].append(item)
        if "faults" in item.path.parts:
            item.add_marker("faults")
    # Tests with a cluster mostly wait for it: between the others, they leave no processor idle.
    share = len(waiting) / max(1, len(modules))
    items[:] = waiting if not modules else []
    for number, module in enumerate(modules.values()):
        items += waiting[round(number * share) : round((number + 1) * share)] + module


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget the processes that the test before has started."""
    STARTED.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in the event loop of the product."""
    if not iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    uvloop.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say of a failed test which processes it has started, and whether warm: a cold one may behave differently."""
    report = yield
    if report.failed and STARTED:
        report.sections.append(("processes started (COLD=1 starts all of them cold)", "\n".join(STARTED[-50:])))
    return report


def pytest_collection_finish() -> None:
    """Exempt the collected tests, which stay to the end, from garbage collection."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Leave no cluster running, and nothing in a user's folders."""
    stop_shared_lab()
    shutil.rmtree(HOME, ignore_errors=True)
