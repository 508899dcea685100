"""Graders that run the code of lm-eval's tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import holdfast
from holdfast.graders.pool import Pool

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_metrics_of_all_tasks_share_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark may have dozens of such metrics, and a process takes seconds to import lm-eval."""
    started: list[Any] = []
    start = Pool._start

    async def count(pool: Pool) -> Any:
        started.append(pool)
        return await start(pool)

    monkeypatch.setattr(Pool, "_start", count)
    (tmp_path / "agent.py").write_text("def reply(prompt):\n    return 'It is #### 4'\n")
    run = holdfast.evaluate(
        name="sums",
        samples=[
            {"id": str(number), "doc": {"question": f"{number}: 2 + 2?", "answer": f"#### {number}"}}
            for number in range(6)
        ],
        prompt="{{ doc.question }}",
        target={"python": f"{tmp_path}/agent.py:reply"},
        graders=[
            {"type": "lm_eval", "name": name, "task": task, "metric": "exact_match", "filter": name.partition("@")[0]}
            for task in ("gsm8k", "gsm8k_cot")
            for name in (f"strict-match@{task}", f"flexible-extract@{task}")
        ],
        runs_dir=tmp_path / "runs",
    )
    assert run.finished and [grader.passed for grader in run.metrics.graders.values()] == [1, 1, 0, 1]
    assert len(started) <= 2
