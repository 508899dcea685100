import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running import holdfast, lines, metrics, run_dir, server, write_eval


def test_an_eval_writes_metrics_and_repeating_it_sends_no_request(tmp_path: Path) -> None:
    with server() as mock:
        path = write_eval(tmp_path, mock.base_url, rows=20)
        holdfast("eval", path, cwd=tmp_path)
        run = run_dir(tmp_path)
        assert metrics(run)["metrics"]["exact"]["score"] == 0.5
        assert mock.requests == 20
        again = holdfast("eval", path, cwd=tmp_path)
        assert "already finished" in again.stdout
        assert mock.requests == 20
        assert len(lines(run / "outputs.jsonl")) == 20


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_standard_streams_may_be_closed(closed: str, tmp_path: Path) -> None:
    with server() as mock:
        path = write_eval(tmp_path, mock.base_url, rows=3)
        subprocess.run(f"{sys.executable} -m holdfast eval {path} {closed}", shell=True, cwd=tmp_path, check=True)
    assert metrics(run_dir(tmp_path))["coverage"] == 1.0
