"""The folder that jobs run from: nobody but its owner may write it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from holdfast.apps.cluster.remote.submit import submit
from holdfast.apps.cluster.remote.transport import Here
from holdfast.errors import ClusterError
from tests.support.clusters import launched, lay_out

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another group needs root")
@pytest.mark.parametrize("exposed", ["base", "base/holdfast"])
@pytest.mark.parametrize(("mode", "why"), [(0o777, "everybody may write"), (0o775, "the group daemon may write")])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, exposed: str, mode: int, why: str) -> None:
    folder, base = lay_out(tmp_path / "project"), tmp_path / "base"
    (base / "holdfast").mkdir(parents=True, mode=0o755)
    os.chown(tmp_path / exposed, -1, 1)
    (tmp_path / exposed).chmod(mode)
    launch = launched(folder, "newer", "BIG", f"run.env.remote_job_dir={base}", "~execution.auto_export")
    environ = {"HF_TOKEN": "t", "OTHER_TOKEN": "t"}
    with pytest.raises(ClusterError) as caught:
        submit(launch, environ, transport=Here(pauses=()))
    assert f"other users can change what your jobs run: {why}" in str(caught.value)
    assert f"chmod go-w {base} {base}/holdfast" in str(caught.value)
