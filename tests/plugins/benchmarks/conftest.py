"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.forking import ForkedIfPossible, start_warm_process
from tests.support.hub import write_hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.sharing import FillOnce


@pytest.fixture(autouse=True, scope="package")
def forked_compilers() -> Iterator[None]:
    """Fork the processes that compile, which import lm-eval, even if code under test starts them."""
    start_warm_process()  # a forked process must have its environment
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", ForkedIfPossible)
        yield


@pytest.fixture(scope="session")
def shared(fill_once: FillOnce) -> Path:
    """Return a folder that all tests of benchmarks share, with a mirror of the hub and room for a cache."""
    return fill_once("benchmarks", lambda folder: write_hub(folder / "hub"))


@pytest.fixture(scope="session")
def shared_settings(shared: Path) -> dict[str, str]:
    """Return the variables that name the mirror and the cache."""
    return {"HOLDFAST_HOME": str(shared / "home"), "HOLDFAST_DATA": str(shared / "hub")}
