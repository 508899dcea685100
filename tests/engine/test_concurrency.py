"""Workers are suggested only if one process limits the run."""

from __future__ import annotations

import pytest

from holdfast.engine.admission import Machine, SpareCores


def suggestion(*, busy: float, load: float, cores: int = 8, usable: float = 8.0) -> str | None:
    """What is said after ten seconds, in which the process used a core for `busy` of the time."""
    spare = SpareCores()
    assert spare.look(Machine(100.0, 5.0, load, cores, usable)) is None
    return spare.look(Machine(110.0, 5.0 + 10 * busy, load, cores, usable))


def test_idle_cores_next_to_a_busy_process_are_named_with_the_option() -> None:
    assert "7 other cores are idle" in (suggestion(busy=0.97, load=0.3) or "")
    assert "--workers 3:" in (suggestion(busy=0.97, load=5.2) or "")
    assert "another core is idle" in (suggestion(busy=1.0, load=1.0, cores=2, usable=2.0) or "")


@pytest.mark.parametrize(
    ("busy", "load", "usable"),
    [(0.6, 0.6, 8.0), (0.97, 7.8, 8.0), (0.97, 0.9, 1.0), (0.97, 0.9, 1.5)],
    ids=["it waits for the server", "others use the cores", "one core is allowed", "less than two are allowed"],
)
def test_nothing_is_suggested_if_workers_would_not_help(busy: float, load: float, usable: float) -> None:
    assert suggestion(busy=busy, load=load, usable=usable) is None


def test_workers_are_suggested_once_and_after_ten_seconds() -> None:
    spare = SpareCores()
    looks = [spare.look(Machine(100.0 + second, 5.0 + second, 1.0, 8, 8.0)) for second in range(60)]
    assert [second for second, message in enumerate(looks) if message is not None] == [10]
