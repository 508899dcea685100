import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running import metrics, run_dir, server, write_eval


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_standard_streams_may_be_closed(closed: str, tmp_path: Path) -> None:
    with server() as mock:
        path = write_eval(tmp_path, mock.base_url, rows=3)
        subprocess.run(f"{sys.executable} -m holdfast eval {path} {closed}", shell=True, cwd=tmp_path, check=True)
    assert metrics(run_dir(tmp_path))["coverage"] == 1.0
