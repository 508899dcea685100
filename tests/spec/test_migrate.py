"""`holdfast migrate`: earlier files become today's, everything else in them stays, and nothing is done twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError, UsageError
from holdfast.spec.document import parse_document, read_document
from holdfast.spec.legacy import GRADERS, KEYS, WRAPPED
from holdfast.spec.load import load_eval
from holdfast.spec.migrate import migrate
from holdfast.spec.schema import SCHEMA_VERSION
from holdfast.store.lease import RunLease
from holdfast.store.records import SCHEMA_VERSION as RUN_VERSION
from tests.support.breaking import holdfast_with_faults, needs_strace
from tests.support.lab import tree
from tests.support.patterns import answered, finished_run
from tests.support.running import holdfast

if TYPE_CHECKING:
    from pathlib import Path

OLD = """\
# My eval, from long ago
name: old          # keep me
model: 'some-model'

dataset: "q.jsonl"   # the questions
prompt: "{{ question }}"
follow_up_prompts:
  - Sure?
trials_per_sample: 2
graders:
  - type: regex    # digits
    config:
      must_match: ["\\\\d+"]
  # a word
  - {type: keyword, must_contain: [a], must_not_contain: [b]}
  - type: llm_judge
    name: judge
    prompt: good?
checkpoints:
- after_turn: 1
  graders: [{"type": "regex", "must_not_match": 'x'}]
gate: {regex: 0.5}
# the end"""

NEW = """\
# My eval, from long ago
schemaVersion: "1.4"
name: old          # keep me
target: {model: 'some-model'}

dataset: "q.jsonl"   # the questions
prompt: "{{ question }}"
follow_ups:
  - Sure?
trials: 2
graders:
  - name: regex
    type: text    # digits
    config:
      regex_match: ["\\\\d+"]
  # a word
  - {name: keyword, type: text, contains: [a], not_contains: [b]}
  - type: prompt
    name: judge
    rubric: good?
checkpoints:
- after_turn: 1
  graders: [{"name": "regex", "type": "text", "regex_not_match": 'x'}]
gate: {regex: 0.5}
# the end"""

TODAY = """\
name: e
samples: [{id: a, question: q, expected: x}]
target: {model: m}
prompt: "{{ question }}"
graders: [{type: exact}]
"""


def become(tmp_path: Path, text: Any) -> Any:
    """Return the migrated text."""
    path = tmp_path / "e.yaml"
    path.write_bytes(text.encode())
    return migrate(path).after


class TestAFile:
    def test_old_spellings_become_todays_and_all_else_stays(self, tmp_path: Path) -> None:
        assert become(tmp_path, OLD) == NEW
        (tmp_path / "e.yaml").write_text(NEW)
        spec = load_eval(tmp_path / "e.yaml")
        assert spec.notices == () and spec.trials == 2
        assert [grader.name for grader in spec.graders] == ["regex", "keyword", "judge"]

    @pytest.mark.parametrize("change", [lambda text: text.replace("\n", "\r\n"), lambda text: "\ufeff" + text])
    def test_line_ends_and_a_byte_order_mark_stay(self, tmp_path: Path, change: Any) -> None:
        assert become(tmp_path, change(OLD)) == change(NEW)

    @pytest.mark.parametrize(
        ("old", "new"),
        [(f"{old}: 3", f"{new}: 3") for old, new in KEYS.items()]
        + [(f"{old}: text", f"{block}: {{{key}: text}}") for old, (block, key) in WRAPPED.items()]
        + [("model: a/b:7b", 'target: {model: "a/b:7b"}'), ('"model": "m"', '"target": {"model": "m"}')]
        + [
            ("model: '[ab]*'", "target: {model: '[ab]*'}"),
            ("model: a, b {c}  # d", 'target: {model: "a, b {c}"}  # d'),
        ],
    )
    def test_each_key_of_the_table(self, tmp_path: Path, old: Any, new: Any) -> None:
        rest = "".join(f"{line}\n" for line in TODAY.splitlines() if not line.startswith(new.split(":")[0].strip('"')))
        assert become(tmp_path, rest + old + "\n") == f'schemaVersion: "{SCHEMA_VERSION}"\n{rest}{new}\n'

    @pytest.mark.parametrize(
        ("kind", "old"), [(kind, old) for kind, (_, parameters) in GRADERS.items() for old in parameters]
    )
    def test_each_grader_of_the_table(self, tmp_path: Path, kind: Any, old: Any) -> None:
        today, parameters = GRADERS[kind]
        text = TODAY.replace("{type: exact}", f"{{type: {kind}, {old}: word}}, {{name: n, type: {kind}, {old}: word}}")
        document = parse_document(become(tmp_path, text), tmp_path / "e.yaml")
        expected = {"type": today, parameters[old]: "word"}
        assert document.data["graders"] == [{"name": kind, **expected}, {"name": "n", **expected}]
        (tmp_path / "e.yaml").write_text(become(tmp_path, text))
        assert [grader.name for grader in load_eval(tmp_path / "e.yaml").graders] == [kind, "n"]

    def test_running_an_unmigrated_file_is_refused_with_every_place_and_the_command(self, tmp_path: Path) -> None:
        (tmp_path / "e.yaml").write_text(OLD)
        with pytest.raises(ConfigError) as caught:
            load_eval(tmp_path / "e.yaml")
        message = str(caught.value)
        for place in ("3: model", "7: follow_up_prompts", "9: trials_per_sample", "11: graders[0].type"):
            assert f"e.yaml:{place}: " in message
        for place in ("graders[1].must_contain: is now contains", "checkpoints[0].graders[0].type: regex is now text"):
            assert place in message
        assert f"holdfast migrate {tmp_path}/e.yaml" in message

    def test_a_versioned_file_is_only_given_the_version(self, tmp_path: Path) -> None:
        for written, after in [("'1.0'", "'1.4'"), ('"1.2"', '"1.4"'), ("1.0", '"1.4"')]:
            text = f"{TODAY}schemaVersion:  {written} # that\nfollow_up_prompts: [a]\n"
            assert become(tmp_path, text) == text.replace(written, after)

    @pytest.mark.parametrize("version", ['"1.0"', '"1.1"', None])
    def test_the_budget_gets_its_present_name(self, tmp_path: Path, version: str | None) -> None:
        rest = f"{TODAY}limits:\n  max_tokens: 5000  # in all\n"
        text = rest if version is None else f"schemaVersion: {version}\n{rest}"
        after = become(tmp_path, text)
        assert after == f'schemaVersion: "1.4"\n{rest.replace("max_tokens", "token_budget")}'
        (tmp_path / "e.yaml").write_text(after)
        assert load_eval(tmp_path / "e.yaml").limits.token_budget == 5000

    def test_a_version_before_the_first_is_as_none(self, tmp_path: Path) -> None:
        assert become(tmp_path, f'schemaVersion: "0.3"\n{OLD}') == NEW.replace(
            '# My eval, from long ago\nschemaVersion: "1.4"\n', 'schemaVersion: "1.4"\n# My eval, from long ago\n'
        )

    @pytest.mark.parametrize("head", ["{", '{"', "---\n# a\n\n{ # b\n  "])
    def test_a_file_in_braces_stays_one(self, tmp_path: Path, head: str) -> None:
        quote = '"' if head.endswith('"') else ""
        text = f"{head}name{quote}: e, samples: [], target: {{model: m}}, prompt: p}}"
        version = f'{quote}schemaVersion{quote}: "{SCHEMA_VERSION}", {quote}'
        assert become(tmp_path, text) == head.removesuffix('"') + version + text.removeprefix(head)

    def test_merged_keys_are_changed_where_they_are_defined(self, tmp_path: Path) -> None:
        text = TODAY.replace("[{type: exact}]", "[&a {name: n, type: regex, must_match: x}, {<<: *a, name: m}]")
        after = become(tmp_path, text)
        assert "[&a {name: n, type: text, regex_match: x}, {<<: *a, name: m}]" in after

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ("model: m\n", "e.yaml:6: model: was renamed to target, which the file already has"),
            ("limits: {max_tokens: 1, token_budget: 2}\n", "e.yaml:6: limits.max_tokens: was renamed to token_budget"),
            (
                "trials: 1\ntrials_per_sample: 2\n",
                "e.yaml:7: trials_per_sample: was renamed to trials, which the file already has",
            ),
            ("follow_ups: [&a b]\n? follow_up_prompts\n: []\n", "follow_up_prompts: was renamed to follow_ups"),
        ],
    )
    def test_a_file_that_cannot_be_rewritten_safely_is_left_to_the_user(
        self, tmp_path: Path, more: str, message: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            become(tmp_path, TODAY + more)
        assert message in str(caught.value)

    @given(
        st.lists(st.sampled_from(sorted(GRADERS)) | st.just("exact"), max_size=4),
        st.sets(st.sampled_from(["follow_up_prompts: [a, 'b']", "trials_per_sample: 2", "# ä comment", "system: '#'"])),
        st.sampled_from(["", 'schemaVersion: "1.0"\n', "schemaVersion: 0.5\n", 'schemaVersion: "1.4"\n']),
        st.booleans(),
    )
    def test_twice_is_once_and_other_lines_stay(
        self, tmp_path_factory: pytest.TempPathFactory, kinds: Any, more: Any, head: Any, flow: Any
    ) -> None:
        folder = tmp_path_factory.mktemp("once")
        text = head + TODAY.partition("graders")[0] + "".join(f"{line}\n" for line in sorted(more))
        text += "graders: [" + ", ".join(f"{{type: {kind}}}" for kind in kinds) + "]\n" if flow else "graders:\n"
        text += "" if flow else "".join(f"- # one\n    type: {kind}  # two\n" for kind in kinds)
        after = become(folder, text)
        assert become(folder, after) == after
        kept = [
            line for line in text.splitlines() if line.startswith(("#", "name", "samples", "target", "prompt", "sy"))
        ]
        assert [line for line in after.splitlines() if line in kept] == kept
        if '"1.' in head:  # nothing in it is of another time
            before_data, after_data = (parse_document(one, folder / "e.yaml").data for one in (text, after))
            assert {**before_data, "schemaVersion": "1.4"} == after_data


class TestTheCommand:
    def test_it_rewrites_keeps_a_backup_and_says_what_it_did(self, tmp_path: Path) -> None:
        path = tmp_path / "old.yaml"
        path.write_text(OLD)
        path.chmod(0o640)
        done = holdfast("migrate", "old.yaml", cwd=tmp_path)
        assert path.read_text() == NEW and (tmp_path / "old.yaml.bak").read_text() == OLD
        assert {oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()} == {"0o640"}
        assert "old.yaml: schemaVersion 1.4 is added" in done.stdout
        assert "old.yaml:7: follow_up_prompts: is now follow_ups" in done.stdout
        assert done.stdout.splitlines()[-1] == "old.yaml: version 1.4; backup: old.yaml.bak"

    def test_a_second_time_it_does_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "old.yaml").write_text(OLD)
        holdfast("migrate", "old.yaml", cwd=tmp_path)
        before = tree(tmp_path)
        done = holdfast("migrate", "old.yaml", cwd=tmp_path)
        assert done.stdout == "old.yaml: already version 1.4: nothing to do\n"
        assert tree(tmp_path) == before

    def test_a_backup_is_never_overwritten_and_never_made_twice(self, tmp_path: Path) -> None:
        (tmp_path / "old.yaml").write_text(OLD)
        (tmp_path / "old.yaml.bak").write_text("mine")
        holdfast("migrate", "old.yaml", cwd=tmp_path)
        assert (tmp_path / "old.yaml.bak").read_text() == "mine"
        assert (tmp_path / "old.yaml.bak.1").read_text() == OLD
        (tmp_path / "old.yaml").write_text(OLD)
        holdfast("migrate", "old.yaml", cwd=tmp_path)
        assert len(list(tmp_path.iterdir())) == 3

    def test_a_dry_run_shows_the_difference_and_writes_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "old.yaml").write_text(OLD)
        before = tree(tmp_path)
        shown = holdfast("migrate", "old.yaml", "--dry-run", cwd=tmp_path).stdout
        assert "\n-follow_up_prompts:\n+follow_ups:\n" in shown and tree(tmp_path) == before
        (entry,) = json.loads(holdfast("migrate", "old.yaml", "--dry-run", "--json", cwd=tmp_path).stdout)
        assert (entry["status"], entry["from"], entry["to"], entry["diff"]) == ("would migrate", None, "1.4", shown)

    def test_a_folder_stands_for_its_evals_and_a_link_stays_one(self, tmp_path: Path) -> None:
        folder = tmp_path / "evals"
        folder.mkdir()
        (folder / "a.yaml").write_text(OLD)
        (folder / "b.yml").write_text(TODAY)
        (folder / "other.yaml").write_text("services: {}\n")
        (folder / "list.yaml").write_text("- 1\n")
        (folder / "waza.yaml").write_text("name: w\nskill: s\nconfig: {executor: mock}\ntasks: [t/*.yaml]\n")
        (tmp_path / "link.yaml").symlink_to(folder / "a.yaml")
        entries = json.loads(holdfast("migrate", "link.yaml", "evals", "--json", cwd=tmp_path).stdout)
        assert [(entry["path"], entry["status"]) for entry in entries] == [
            ("link.yaml", "migrated"),
            ("evals/a.yaml", "current"),
            ("evals/b.yml", "migrated"),
            ("evals/waza.yaml", "waza"),
        ]
        assert (tmp_path / "link.yaml").is_symlink() and (folder / "a.yaml").read_text() == NEW
        assert read_document(folder / "b.yml").data == {
            "schemaVersion": "1.4",
            **parse_document(TODAY, folder / "b.yml").data,
        }

    def test_a_file_of_wazas_is_left_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "eval.yaml").write_text('schemaVersion: "1.5"\nname: w\nskill: s\ntasks: [t/*.yaml]\n')
        before = tree(tmp_path)
        assert "waza" in holdfast("migrate", "eval.yaml", cwd=tmp_path).stdout and tree(tmp_path) == before

    @pytest.mark.parametrize("version", ["2.0", "3.0", "1.1.0"])
    def test_a_file_of_wazas_that_eval_rejects_is_rejected_here_too(self, tmp_path: Path, version: str) -> None:
        (tmp_path / "eval.yaml").write_text(
            f'schemaVersion: "{version}"\nname: w\nskill: s\nconfig: {{executor: mock}}\ntasks: [t.yaml]\n'
        )
        for command in (["migrate", "eval.yaml"], ["eval", "eval.yaml", "--dry-run"]):
            done = holdfast(*command, cwd=tmp_path, check=2)
            assert "eval.yaml:1: schemaVersion: " in done.stderr and done.stdout == "", "it is not said to be fine"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('schemaVersion: "2.0"\n' + TODAY, "Upgrade Holdfast"),
            ("schemaVersion: abc\n" + TODAY, "is not a version"),
            ("schemaVersion: 1.10\n" + TODAY, "without quotes"),
            ("a: [", "not valid YAML"),
            ("a: 1\n", "not an eval file"),
            ("- 1\n", "an eval file is a mapping"),
            (None, "no such file"),
        ],
    )
    def test_files_that_cannot_be_migrated_are_refused_and_the_others_are_migrated(
        self, tmp_path: Path, text: str | None, message: str
    ) -> None:
        if text is not None:
            (tmp_path / "e.yaml").write_text(text)
        (tmp_path / "old.yaml").write_text(OLD)
        done = holdfast("migrate", "e.yaml", "old.yaml", cwd=tmp_path, check=2)
        assert message in done.stderr and (tmp_path / "old.yaml").read_text() == NEW
        assert text is None or (tmp_path / "e.yaml").read_text() == text
        assert not (tmp_path / "e.yaml.bak").exists()

    def test_a_folder_without_evals_is_refused(self, tmp_path: Path) -> None:
        assert "folder with eval files" in holdfast("migrate", ".", cwd=tmp_path, check=2).stderr

    def test_a_newer_minor_is_up_to_date(self, tmp_path: Path) -> None:
        (tmp_path / "e.yaml").write_text('schemaVersion: "1.9"\n' + TODAY)
        assert "already version 1.9" in holdfast("migrate", "e.yaml", cwd=tmp_path).stdout

    def test_a_file_that_changed_meanwhile_is_not_overwritten(self, tmp_path: Path) -> None:
        path = tmp_path / "e.yaml"
        path.write_text(OLD)
        migration = migrate(path)
        path.write_text(OLD + "\n# and more")
        with pytest.raises(UsageError, match="modified by another process"):
            migration.save()
        assert path.read_text() == OLD + "\n# and more"

    @pytest.mark.faults
    @needs_strace
    @pytest.mark.parametrize("fault", ["rename:signal=SIGKILL:when=1", "rename:signal=SIGKILL:when=2"])
    def test_a_killed_migration_leaves_a_whole_file_and_can_be_repeated(self, tmp_path: Path, fault: str) -> None:
        (tmp_path / "old.yaml").write_text(OLD)
        holdfast_with_faults("migrate", "old.yaml", faults=[fault], cwd=tmp_path, check=-signal.SIGKILL)
        assert (tmp_path / "old.yaml").read_text() == OLD
        assert (tmp_path / "old.yaml.bak").exists() == fault.endswith("2")
        holdfast("migrate", "old.yaml", cwd=tmp_path)
        assert (tmp_path / "old.yaml").read_text() == NEW
        assert [file.read_text() for file in tmp_path.glob("old.yaml.bak*")] == [OLD]

    @pytest.mark.faults
    @needs_strace
    @pytest.mark.parametrize("nth", [1, 3], ids=["at the backup", "at the file"])
    def test_a_full_disk_leaves_the_file_as_it_was(self, tmp_path: Path, nth: int) -> None:
        (tmp_path / "old.yaml").write_text(OLD)
        fault = f"fsync:error=ENOSPC:when={nth}"
        done = holdfast_with_faults("migrate", "old.yaml", faults=[fault], cwd=tmp_path, check=3)
        assert "old.yaml: cannot be written: No space left on device" in done.stderr
        assert (tmp_path / "old.yaml").read_text() == OLD


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return finished_run(tmp_path_factory.mktemp("finished") / "lab", answered(2, 1))


@pytest.fixture
def run(finished: Any, tmp_path: Path) -> Any:
    """A finished run of the test's own."""
    return shutil.copytree(finished, tmp_path / "runs" / "e" / finished.name)


def as_written_before(run: Any, version: Any) -> None:
    """Make a run one of an earlier version; all else stays byte for byte."""
    now = f'"schemaVersion": "{RUN_VERSION}"'
    for name in ("manifest.json", "results.json", "metrics.json"):
        text = (run / name).read_text().replace('"schemaVersion":"', '"schemaVersion": "', 1)
        assert now in text
        start, _, rest = text.partition(now)
        put = f'"schemaVersion": "{version}"' if version else ""
        (run / name).write_text(start + put + rest if version else start + rest.removeprefix(",").lstrip())


class TestARun:
    @pytest.mark.parametrize("version", ["1.0", "0.4", None])
    def test_its_files_say_todays_version_and_nothing_else_changes(
        self, run: Any, tmp_path: Path, version: str | None
    ) -> None:
        data = {path.name: json.loads(path.read_text()) for path in run.glob("*.json")}
        as_written_before(run, version)
        journals = {path: content for path, content in tree(run).items() if not path.endswith(".json")}
        done = holdfast("migrate", run, cwd=tmp_path)
        assert f"manifest.json: version {version or 'none'} is now 1.1" in done.stdout
        assert {path.name: json.loads(path.read_text()) for path in run.glob("*.json")} == data
        assert {path: content for path, content in tree(run).items() if not path.endswith(".json")} == journals
        assert sorted(path.name for path in run.parent.iterdir()) == [run.name], "no lease is left"
        before = tree(run)
        assert "already version 1.1: nothing to do" in holdfast("migrate", run, cwd=tmp_path).stdout
        assert tree(run) == before
        holdfast("gate", run, "--min", "correct=0", cwd=tmp_path)

    def test_a_dry_run_changes_nothing(self, run: Any, tmp_path: Path) -> None:
        as_written_before(run, "1.0")
        before = tree(tmp_path)
        assert "is now 1.1" in holdfast("migrate", run, "--dry-run", cwd=tmp_path).stdout
        assert tree(tmp_path) == before

    def test_one_that_is_being_written_is_left_alone(self, run: Any, tmp_path: Path) -> None:
        as_written_before(run, None)
        before = tree(run)
        lease = RunLease(run.with_name(f"{run.name}.lock"), lost=lambda: None)
        lease.acquire(0)
        try:
            assert str(os.getpid()) in holdfast("migrate", run, cwd=tmp_path, check=4).stderr
        finally:
            lease.release()
        assert tree(run) == before

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("manifest.json", '{"schemaVersion": "2.0"', "damaged"),
            ("manifest.json", '{"name": "e"}', "holdfast repair"),
            ("metrics.json", "[]", "writes it again"),
            ("metrics.json", '{"schemaVersion": "2.0"}', "Upgrade Holdfast"),
        ],
    )
    def test_a_run_that_cannot_be_migrated_is_refused_and_unchanged(
        self, run: Any, tmp_path: Path, name: str, content: str, message: str
    ) -> None:
        as_written_before(run, "1.0")
        (run / name).write_text(content)
        before = tree(run)
        assert message in holdfast("migrate", run, cwd=tmp_path, check=2).stderr
        assert tree(run) == before
