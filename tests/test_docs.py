"""The documentation's files are written and its commands run, in the order in which a reader meets them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running import ROOT, environment

MARKED = re.compile(r"<!-- (file|run)(?:: (.+?))? -->\n```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if MARKED.search(path.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_a_page_shows_works(page: Path, tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    env = environment(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
    ran = 0
    for kind, argument, body in MARKED.findall(page.read_text()):
        if kind == "file":
            (tmp_path / argument).write_text(body)
            continue
        wanted = int(argument.removeprefix("exit ")) if argument else 0
        for line in body.splitlines():
            if line.startswith("$ "):
                done = subprocess.run(
                    ["bash", "-c", line[2:]], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900
                )
                assert done.returncode == wanted, f"{line}\n{done.stdout}\n{done.stderr}"
                ran += 1
    if page.name == "tutorial.md":
        assert ran >= 8


def test_every_page_and_file_that_is_linked_exists() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
