"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.forking import ForkedIfPossible, start_warm_process

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="package")
def forked_compilers() -> Iterator[None]:
    """Fork the processes that compile, which import lm-eval, also where tests call what starts them."""
    start_warm_process()  # whose environment that of a forked process must equal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", ForkedIfPossible)
        yield
