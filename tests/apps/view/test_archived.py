"""Runs that `--fresh` archived have their own addresses, although the runs that replaced them have the same ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.running import holdfast, module_server, run_dir, wait_for, write_eval
from tests.support.viewing import viewer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.running import Server
    from tests.support.viewing import Viewer

provider = module_server()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, provider: Server) -> Path:
    """A folder with a run, and the run that it replaced."""
    path = tmp_path_factory.mktemp("archived")
    spec = write_eval(path, provider.base_url, rows=3)
    holdfast("eval", spec, cwd=path)
    holdfast("eval", spec, "--fresh", cwd=path)
    return path


@pytest.fixture(scope="module")
def shown(folder: Path) -> Iterator[Viewer]:
    with viewer(folder, home=folder / "home") as running:
        yield running


def archived(folder: Path) -> Path:
    [path] = (folder / "runs").glob("*/archived/*")
    return path


def test_archived_runs_are_listed_apart(shown: Viewer, folder: Path) -> None:
    page = shown.json("/index.json")
    [item] = page["archived"]
    assert page["total"] == 1
    assert (folder / item["run"]["path"]) == archived(folder)
    assert item["name"] == run_dir(folder).name.rpartition("-")[2] + "." + archived(folder).name.rpartition(".")[2]
    assert f'href="/run/{item["name"]}"' in shown.get("/").text
    assert shown.json("/index.json?q=nothing")["archived"] == []


def test_every_link_of_an_archived_run_leads_to_itself(shown: Viewer, folder: Path) -> None:
    name = shown.json("/index.json")["archived"][0]["name"]
    run = shown.json(f"/run/{name}.json")
    assert (run["status"], run["overview"]["run"], run["overview"]["changes"]) == ("finished", name, None)
    wait_for(lambda: shown.json(f"/run/{name}/trials.json")["building"] is None, "the columns")
    trials = shown.get(f"/run/{name}/trials").text
    row = shown.json(f"/run/{name}/trials.json")["rows"][0]
    address = f"/run/{name}/trial/{row['sample']}/{row['trial']}"
    assert f'href="{address}"' in trials
    trial = shown.get(address)
    assert trial.status == 200
    assert f'href="/run/{name}"' in trial.text
    plain = name.partition(".")[0]
    assert f'href="/run/{plain}"' not in trials + trial.text


def test_an_archived_run_is_compared_with_the_run_that_replaced_it(shown: Viewer, folder: Path) -> None:
    name = shown.json("/index.json")["archived"][0]["name"]
    plain = name.partition(".")[0]
    comparison = shown.json(f"/compare/{name}/{plain}.json")
    assert [side["run"] for side in comparison["runs"]] == [name, plain]
    assert shown.get(f"/compare/{name}/{plain}/trial/{comparison['rows'][0]['sample']}/1").status == 200


def test_an_archived_run_is_named_by_its_path(shown: Viewer, folder: Path) -> None:
    name = shown.json("/index.json")["archived"][0]["name"]
    both = archived(folder), run_dir(folder)
    with viewer(folder, *both, home=folder / "home") as running:
        assert running.page == f"/compare/{name}/{name.partition('.')[0]}"
        assert running.get(running.page).status == 200
        assert running.json("/index.json")["archived"] == []
