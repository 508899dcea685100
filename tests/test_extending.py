"""Plug-ins: a third party's package (tests/fixtures/plugin) is built, installed and used, as docs/extending.md shows.

The package has one kind for each extension point, under `[project.entry-points]` of its `pyproject.toml`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.apps.cluster.config.compile import LaunchRequest, compile_launch
from holdfast.apps.cluster.remote.registry import InvocationRegistry
from holdfast.apps.cluster.remote.submit import submit
from holdfast.apps.cluster.remote.transport import Here
from holdfast.apps.cluster.watch.logs import follow
from holdfast.data.dataset import Sample
from holdfast.errors import ConfigError, UsageError
from holdfast.graders.types import Case
from holdfast.spec.formats import resolve_eval
from tests.support.running import ROOT, Server
from tests.support.running import holdfast as run_command
from tests.support.specs import command, identities, load, output_of, who, write_spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.sharing import FillOnce

SOURCE = ROOT / "tests" / "fixtures" / "plugin"
ROWS = [{"id": "a", "q": "A cup, please"}, {"id": "b", "q": "Thank you, and please go"}, {"id": "c", "q": "No"}]
POLITENESS = [{"type": "politeness"}]
HI: dict[str, Any] = {"name": "e", "samples": ROWS, "prompt": "{{ q }}", "target": {"command": ["echo", "hi"]}}
ECHO: dict[str, Any] = {"name": "e", "samples": ROWS, "prompt": "{{ q }}", "target": {"type": "echo"}}


def install(source: Path, site: Path) -> None:
    """Build a wheel of the package and install it, without a network."""
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "--disable-pip-version-check", "-q"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", site, source], check=True)


@pytest.fixture(scope="session")
def site(fill_once: FillOnce) -> Path:
    """A folder of installed packages with the plug-in in it."""

    def build(folder: Path) -> None:
        shutil.copytree(SOURCE, folder / "source")
        install(folder / "source", folder / "site-packages")

    return fill_once("plugin", build) / "site-packages"


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plug-in, installed for this process."""
    monkeypatch.syspath_prepend(site)
    return site


@pytest.fixture
def evaluate(tmp_path: Path, installed: Path) -> Callable[..., holdfast.Run]:
    def run(**keys: Any) -> holdfast.Run:
        return holdfast.evaluate(**{**ECHO, "runs_dir": tmp_path / "runs", **keys})

    return run


class TestGraders:
    def test_a_grader_has_its_own_keys_and_threshold(self, evaluate: Any) -> None:
        run = evaluate(graders=[{"type": "politeness", "at_least": 2}])
        assert [row["grades"]["politeness"]["score"] for row in run.results()] == [0.5, 1.0, 0.0]
        assert [row["grades"]["politeness"]["status"] for row in run.results()] == ["passed", "passed", "failed"]
        assert run.results()[1]["grades"]["politeness"]["feedback"] == "2 polite words"

    def test_a_wrong_key_is_reported_with_its_line_and_a_hint(self, installed: Path, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"eval.yaml:\d+: graders\[0\].word: unknown key \(did you mean 'words'\?"
        ):
            load(tmp_path, graders=[{"type": "politeness", "word": ["hello"]}])
        with pytest.raises(ConfigError, match=r"graders\[0\].at_least: should be a whole number, not 'two'"):
            load(tmp_path, graders=[{"type": "politeness", "at_least": "two"}])

    def test_a_template_is_refused_unless_the_block_reads_it(self, installed: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"eval.yaml:\d+: graders\[0\].words\[0\]: is not a template"):
            load(tmp_path, graders=[{"type": "politeness", "words": ["{{ word }}"]}])
        row = Sample("a", {"word": "please", "n": 2}, "sha256:0", "here")
        assert Case(row, output_of("x")).fill_in(("{{ word }}!", "{{ n }}")) == ["please!", 2]

    def test_an_unknown_name_lists_the_closest_and_the_plugins(self, installed: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as raised:
            load(tmp_path, graders=[{"type": "polite"}])
        message = str(raised.value)
        assert "unknown grader type 'polite' (did you mean 'politeness'?); one of exact, text," in message
        assert "from plug-ins: politeness (holdfast-kitchen 1.2.0), rhyme (holdfast-kitchen 1.2.0)" in message

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            ("nothing", "the grader 'rhyme' returned NoneType, not a holdfast.Verdict"),
            ("object", "the grader 'rhyme' returned a value that cannot be serialized as JSON"),
            ("exception", r"graders.py:\d+: LookupError: no rhyme for a"),
        ],
    )
    def test_a_careless_grader_makes_error_grades_and_no_scores(self, evaluate: Any, answer: str, message: str) -> None:
        run = evaluate(samples=ROWS[:1], graders=[{"type": "rhyme", "answer": answer}], accept_errors=True)
        grade = run.results()[0]["grades"]["rhyme"]
        assert (grade["status"], grade["score"]) == ("error", None)
        errors = [json.loads(line) for line in (run.path / "errors.jsonl").read_text().splitlines()]
        assert len(errors) == 1 and re.search(message, errors[0]["message"])


class TestTargets:
    def test_a_target_answers_with_its_own_keys(self, evaluate: Any) -> None:
        run = evaluate(target={"type": "echo", "suffix": "!"}, graders=[{"type": "exact", "expected": "{{ q }}!"}])
        assert run.score == 1 and run.metrics.target == "echo"
        assert run.metrics.usage.requests == 3

    def test_a_target_is_measured_with_a_benchmark(self, evaluate: Any, tmp_path: Path) -> None:
        (tmp_path / "eval.yaml").write_text(
            'schemaVersion: "1.0"\nbenchmark: gsm8k-sample\ntarget: {type: echo, suffix: "!"}\ndataset: {limit: 1}\n'
        )
        run = holdfast.evaluate(tmp_path / "eval.yaml", runs_dir=tmp_path / "runs")
        assert run.metrics.target == "echo"
        assert [row["output"].endswith("Answer:!") for row in run.results()] == [True]

    def test_exceptions_of_a_target_are_errors_of_a_trial(self, evaluate: Any) -> None:
        rows = [*ROWS, {"id": "d", "q": "crash"}]
        run = evaluate(samples=rows, graders=[], limits={"retries": 0}, accept_errors=True)
        assert [row["sample"] for row in run.results() if row.get("output") is None] == ["d"]
        (error,) = [json.loads(line) for line in (run.path / "errors.jsonl").read_text().splitlines()]
        assert error["kind"] == "agent" and error["message"].endswith("LookupError: crashed")

    def test_a_key_of_a_plugin_may_have_the_name_of_a_built_in_kind(self, installed: Path, tmp_path: Path) -> None:
        spec = load(tmp_path, target={"type": "cook", "command": ["x"], "model": "m"})
        assert (spec.target.kind, spec.target.command, spec.target.model) == ("cook", ["x"], "m")
        with pytest.raises(ConfigError, match=r"target.model: unknown key"):
            load(tmp_path, target={"type": "echo", "model": "m"})
        with pytest.raises(ConfigError, match=r"needs exactly one of model, python.*, not model and type"):
            load(tmp_path, target={"type": "model", "model": "m"})


AGENT = """#!{python}
import json, os, sys, urllib.request

order = sys.argv[1]
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = {{"model": os.environ["COOK_MODEL"], "messages": [{{"role": "user", "content": order}}]}}
request = urllib.request.Request(url, json.dumps(body).encode(), {{"Content-Type": "application/json"}})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"], os.environ["COOK_TRIAL"])
sys.exit(124 if order == "late" else 0)
"""


class TestAgents:
    @pytest.fixture
    def cook(self, tmp_path: Path, provider: Server) -> dict[str, Any]:
        """The block of an agent that asks a model through the proxy."""
        program = tmp_path / "cook.py"
        program.write_text(AGENT.format(python=sys.executable))
        program.chmod(0o755)
        return {"type": "cook", "command": [str(program)], "model": "m", "base_url": provider.base_url}

    def test_model_calls_of_an_agent_are_recorded_and_the_trial_has_its_key(self, evaluate: Any, cook: Any) -> None:
        run = evaluate(target=cook, samples=[{"id": "a", "q": "soup"}], graders=[])
        (output,) = [json.loads(line) for line in (run.path / "outputs.jsonl").read_text().splitlines()]
        assert output["output"].endswith(output["key"])
        assert run.metrics.usage.requests == 1 and (run.path / "steps.jsonl").exists()

    def test_recorded_calls_of_a_target_are_not_made_again_after_a_kill(self, site: Path, tmp_path: Path) -> None:
        rows = [{"id": "a", "q": "fire"}]
        path = write_spec(tmp_path, **{**ECHO, "target": {"type": "waiter"}, "samples": rows, "graders": []})
        for code in (-9, 0):
            run_command("eval", path, cwd=tmp_path, env={"PYTHONPATH": str(site)}, check=code)
        model, cut_off, again = (tmp_path / "calls.txt").read_text().split()
        assert (model, cut_off) == ("model", again)
        (run,) = (tmp_path / "runs" / "e").iterdir()
        (output,) = [json.loads(line) for line in (run / "outputs.jsonl").read_text().splitlines()]
        assert output["output"] == f"fire for table 4: eight minutes in e/{run.name}"
        assert output["usage"]["requests"] == 1

    def test_a_limit_of_an_agent_is_scored_if_the_eval_says_so(self, evaluate: Any, cook: Any) -> None:
        rows = [{"id": "a", "q": "soup"}, {"id": "b", "q": "late"}]
        run = evaluate(target=cook, samples=rows, graders=[], limits={"on_limit": "score"})
        outputs = [json.loads(line) for line in (run.path / "outputs.jsonl").read_text().splitlines()]
        assert {output["sample"]: output["stop"] for output in outputs} == {"a": "stop", "b": "time_limit"}

    def test_a_row_has_its_own_time(self, evaluate: Any, cook: Any, provider: Server) -> None:
        provider.control(latency=5)
        rows = [{"id": "a", "q": "soup", "minutes": 0.005}]
        run = evaluate(target=cook, samples=rows, graders=[], limits={"retries": 0}, accept_errors=True)
        (error,) = [json.loads(line) for line in (run.path / "errors.jsonl").read_text().splitlines()]
        assert error["kind"] == "timeout", error


class TestExporters:
    def test_an_exporter_writes_a_run_with_its_own_options(
        self, evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = {"export": [{"to": "menu", "dir": str(tmp_path / "menus"), "title": "Today"}]}
        run = evaluate(graders=POLITENESS, output=output)
        assert (tmp_path / "menus" / "menu.md").read_text() == "# Today\n- A cup, please\n- Thank you, and please go\n"
        ended = command(monkeypatch, capsys, tmp_path, "export", str(run.path), "--to", "menu", "title=Tonight")
        assert ended.code == 0 and f"wrote {tmp_path}/menus/menu.md" in ended.out
        assert (tmp_path / "menus" / "menu.md").read_text().startswith("# Tonight\n")

    def test_an_unknown_option_of_an_exporter_fails_only_the_export(self, evaluate: Any) -> None:
        with pytest.warns(RuntimeWarning, match="cannot export to menu: .*keyword argument 'titel'"):
            run = evaluate(graders=POLITENESS, output={"export": [{"to": "menu", "titel": "Today"}]})
        assert run.finished and run.exit_code == 0


class TestFormats:
    def test_an_eval_file_of_the_format_runs_as_it_is(self, installed: Path, tmp_path: Path) -> None:
        path = tmp_path / "book.yaml"
        path.write_text("book: soups\nrecipes: [minestrone, goulash]\n")
        run = holdfast.evaluate(path, runs_dir=tmp_path / "runs", trials=2)
        assert (run.metrics.eval, run.metrics.total, run.score) == ("soups", 4, 1.0) if run.metrics else False

    def test_a_folder_is_read_by_the_format_that_claims_it(
        self, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for title in ("soups", "salads"):
            book = tmp_path / title
            book.mkdir()
            (book / "cookbook.toml").write_text(f'title = "{title}"\n')
            (book / "goulash.md").write_text("Cook it for hours.")
        run = holdfast.evaluate(tmp_path / "soups", runs_dir=tmp_path / "runs")
        assert (run.metrics.eval, run.score) == ("soups", 1.0) if run.metrics else False
        assert [row["sample"] for row in run.results()] == ["goulash"]
        again = command(monkeypatch, capsys, tmp_path, "eval", "soups", "--dry-run")
        assert again.code == 0 and "1 trial of 1 sample: 1 finished" in again.out and not again.err
        both = command(monkeypatch, capsys, tmp_path, "eval", "soups", "salads/", "trials=2")
        assert both.code == 0 and "soups" in both.out and "salads" in both.out, both.err

    def test_a_folder_that_no_format_claims_is_refused(
        self, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "empty").mkdir()
        ended = command(monkeypatch, capsys, tmp_path, "eval", "empty")
        assert ended.code == 2 and "empty is a folder without an eval.yaml" in ended.err

    def test_the_package_is_not_imported_for_native_files(self, installed: Path, tmp_path: Path) -> None:
        script = "import holdfast as h, sys; h.evaluate('eval.yaml'); print('holdfast_kitchen.formats' in sys.modules)"
        write_spec(tmp_path, **HI, graders=[])
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "False"


class TestFunctions:
    """`package.module:function` works wherever `file.py:function` does."""

    def test_functions_of_a_package_are_targets_tools_users_graders_and_keep_state(self, evaluate: Any) -> None:
        module = "holdfast_kitchen.functions"
        run = evaluate(
            target={
                "python": f"{module}:shout",
                "tools": [{"python": f"{module}:price"}],
                "state": {"save": f"{module}:save", "restore": f"{module}:restore"},
            },
            responder={"python": f"{module}:insist", "max_followups": 2},
            graders=[{"type": "python", "function": f"{module}:is_loud"}],
            samples=ROWS[:1],
        )
        assert run.results()[0]["output"] == "AGAIN cup: 3" and run.score == 0

    def test_a_module_that_is_not_there_is_reported_with_a_hint(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"graders\[0\]: no module named kitchen.sink\n(?s:.*)as FILE.py:wash"):
            identities(load(tmp_path, graders=[{"type": "python", "function": "kitchen.sink:wash"}]))


class TestExecutors:
    def test_an_executor_runs_the_jobs_of_a_launch(
        self, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", str(installed))  # the jobs need the plug-in, too
        monkeypatch.chdir(tmp_path)
        (tmp_path / "env.toml").write_text('[quiet]\nexecutor = "nice"\nremote_job_dir = "jobs"\n')
        commands: list[list[str]] = []
        spawn = os.posix_spawnp

        def recorded(path: str, argv: list[str], *rest: Any, **more: Any) -> int:
            commands.append(argv)
            return spawn(path, argv, *rest, **more)

        monkeypatch.setattr(os, "posix_spawnp", recorded)
        launch = compile_launch(LaunchRequest("manners", "quiet"))
        registry = InvocationRegistry(tmp_path / "invocations")
        lines: list[str] = []
        code = follow(Here(), submit(launch, os.environ, registry=registry), lines.append)
        assert code == 0, "\n".join(lines)
        assert commands[0][:3] == ["nice", "-n", "19"] and launch.execution.type == "nice"
        (metrics,) = tmp_path.glob("jobs/runs/manners/*/metrics.json")
        assert json.loads(metrics.read_text())["score"] == 1


class TestTasks:
    def test_a_task_is_run_by_its_name(
        self,
        installed: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        shown = command(monkeypatch, capsys, tmp_path, "eval", "manners", "--dry-run").out
        assert "2 samples" in shown
        with pytest.raises(
            UsageError, match=r"no eval file 'maners', and no task of that name \(did you mean 'manners'"
        ):
            resolve_eval("maners")


class TestIdentity:
    def test_installed_code_is_identified_by_its_distribution_and_the_plan_says_so(
        self, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        keys = {
            **ECHO,
            "graders": [
                {"type": "politeness"},
                {"type": "python", "function": "holdfast_kitchen.functions:is_loud"},
                {"type": "python", "name": "same", "function": "operator:eq", "params": {"a": 1, "b": 1}},
            ],
        }
        identity = who(tmp_path, **keys).contents
        assert identity.target["source"] == {"holdfast_kitchen.targets": "holdfast-kitchen 1.2.0"}
        politeness, is_loud, same = identity.graders.values()
        assert politeness["source"] == {"holdfast_kitchen.graders": "holdfast-kitchen 1.2.0"}
        assert is_loud["source"] == {"holdfast_kitchen.functions": "holdfast-kitchen 1.2.0"}
        assert is_loud["function"] == "holdfast_kitchen.functions:is_loud"
        assert same["source"]["operator"].startswith("Python 3.")
        shown = command(monkeypatch, capsys, tmp_path, "eval", "eval.yaml", "--dry-run").out
        for module in ("graders", "functions", "targets"):
            assert f"identified by version: holdfast_kitchen.{module} (holdfast-kitchen 1.2.0)\n" in shown

    def test_a_new_version_is_graded_again(self, site: Path, tmp_path: Path) -> None:
        path = write_spec(
            tmp_path, **{**HI, "target": {"command": ["sh", "-c", "echo 1 >> calls; echo hi"]}, "graders": POLITENESS}
        )
        newer = tmp_path / "newer" / "site-packages"
        shutil.copytree(site, newer)
        metadata = newer / "holdfast_kitchen-1.2.0.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text().replace("Version: 1.2.0", "Version: 1.3.0"))
        for packages in (site, site, newer):
            run_command("eval", path, cwd=tmp_path, env={"PYTHONPATH": str(packages)})
        runs = sorted((tmp_path / "runs" / "e").iterdir())
        assert len(runs) == 2
        assert len((tmp_path / "calls").read_text().split()) == 3, "outputs of the first run are reused"

    def test_code_that_is_not_installed_is_identified_by_its_source(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In an editable install the files are on Python's path, but not in site-packages."""
        package = tmp_path / "checkout" / "kitchen_local"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "shared.py").write_text("LIMIT = 3\n")
        grade = "from .shared import LIMIT\n\n\ndef short(output):\n    return len(output) < LIMIT\n"
        (package / "grade.py").write_text(grade)
        monkeypatch.syspath_prepend(package.parent)
        block = {"type": "python", "function": "kitchen_local.grade:short"}
        (identity,) = identities(load(tmp_path, graders=[block]))
        assert identity["function"] == "short"
        assert identity["source"].keys() == {"__init__.py", "grade.py", "shared.py"}
        run = holdfast.evaluate(**HI, graders=[block], runs_dir=tmp_path / "r")
        assert run.score == 1
        (package / "shared.py").write_text("LIMIT = 2\n")
        again = holdfast.evaluate(**HI, graders=[block], runs_dir=tmp_path / "r")
        assert again.score == 0, "the changed module is loaded again"

    def test_a_plugin_that_is_installed_editable_is_identified_by_its_source(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its entry points are in site-packages, and its code is elsewhere on Python's path."""
        site, checkout = tmp_path / "site-packages", tmp_path / "checkout"
        shutil.copytree(SOURCE / "src" / "holdfast_kitchen", checkout / "kitchen_checkout")
        info = site / "kitchen_checkout-0.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kitchen-checkout\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text("[holdfast.graders]\nmanners = kitchen_checkout.graders:Politeness\n")
        for folder in (site, checkout):
            monkeypatch.syspath_prepend(folder)
        (before,) = identities(load(tmp_path, graders=[{"type": "manners"}]))
        assert before["source"].keys() == {"__init__.py", "graders.py"}
        with (checkout / "kitchen_checkout" / "graders.py").open("a") as file:
            file.write("MORE = 1\n")
        (after,) = identities(load(tmp_path, graders=[{"type": "manners"}]))
        assert after["source"]["graders.py"] != before["source"]["graders.py"]


def test_the_documentation_shows_the_package_that_is_tested_here() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "docs/extending.md", "exec", dont_inherit=True), names)
    for module in ("graders", "targets", "executors"):
        text = (SOURCE / "src" / "holdfast_kitchen" / f"{module}.py").read_text()
        for name in re.findall(r"^class (Politeness\w*|Echo\w*|Waiter\w*|Cook\w*|NiceExecutor)", text, re.MULTILINE):
            assert names[name].__mro__[1].__name__ in text
    points = page[page.index("[project.entry-points") : page.index("Holdfast imports a plug-in only")]
    metadata = (SOURCE / "pyproject.toml").read_text()
    assert all(line in metadata for line in points.splitlines() if " = " in line or line.startswith("["))


def test_the_documentation_names_what_the_package_exports() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    table = page[page.index("Plug-ins need only the package") : page.index("These names change only")]
    named = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert sorted([*named, "__version__"]) == sorted(holdfast.__all__)
