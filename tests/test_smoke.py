from pathlib import Path

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
