"""Configurations put together: groups are really composed, the documented order decides, and places are kept."""

from __future__ import annotations

import copy
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.apps.cluster.config.compose import PREFERRED, compose, find_config
from holdfast.apps.cluster.config.profiles import load_profile
from holdfast.apps.cluster.config.tree import COMMAND_LINE, Tree, escape, interpolate, leaves
from holdfast.errors import UsageError
from tests.support.clusters import PROFILES, lay_out, write
from tests.support.running import holdfast

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.apps.cluster.config.tree import Resolved

MINIMAL = """\
execution: {type: slurm}
deployment: {type: none}
"""


def composed(
    folder: Path, text: str, *overrides: str, profile: str | None = None, detached: bool = False, **environ: str
) -> Resolved:
    path = write(folder / "config" / "c.yaml", textwrap.dedent(text))
    loaded = None if profile is None else load_profile(profile, folder, {})
    return compose(path, overrides, loaded, folder, environ, detached=detached)


def refused(folder: Path, text: str, *overrides: str, **more: Any) -> str:
    with pytest.raises(UsageError) as caught:
        composed(folder, text, *overrides, **more)
    return str(caught.value)


NEWEST = """\
services:
  model: {type: api, url: https://api.example.com/v1, model: m}
benchmarks: [{name: gsm8k}]
cluster: {type: slurm, walltime: "01:00:00"}
"""


def test_a_configuration_of_the_rewritten_evaluator_is_refused_by_name(tmp_path: Path) -> None:
    message = "is of NeMo Evaluator 0.3 and newer (it has services, benchmarks, cluster), which is not supported"
    assert f"config/c.yaml:1: services: {message}" in refused(tmp_path, NEWEST)
    assert "evaluation.tasks (from benchmarks)" in refused(tmp_path, NEWEST)
    done = holdfast("eval", "config/c.yaml", cwd=tmp_path, check=2)
    assert message in done.stderr, "without -c too"


def test_groups_are_composed_and_the_file_itself_wins(tmp_path: Path) -> None:
    text = """\
        defaults:
          - execution: slurm/default
          - deployment: vllm
          - _self_
        deployment:
          served_model_name: m
          port: 9
        """
    tree = composed(tmp_path, text).tree
    assert tree.get("execution", "type") == "slurm"
    assert tree.get("execution", "max_walltime") == "120:00:00"
    assert tree.origin(("execution", "max_walltime")) == "default (execution/slurm/default)"
    assert tree.get("deployment", "port") == 9
    assert tree.origin(("deployment", "port")) == "config/c.yaml:7"
    assert tree.get("deployment", "endpoints", "health") == "/health"
    assert "defaults" not in tree.data


def test_where_self_stands_decides_who_wins(tmp_path: Path) -> None:
    write(tmp_path / "config" / "base.yaml", "execution: {subproject: base}\n")
    text = "execution: {type: slurm, subproject: own}\ndeployment: {type: none}\n"
    after = composed(tmp_path, f"defaults: [base, _self_]\n{text}").tree
    before = composed(tmp_path, f"defaults: [_self_, base]\n{text}").tree
    unsaid = composed(tmp_path, f"defaults: [base]\n{text}").tree
    assert after.get("execution", "subproject") == unsaid.get("execution", "subproject") == "own"
    assert before.get("execution", "subproject") == "base"
    assert before.origin(("execution", "subproject")) == "config/base.yaml:1"


def test_later_entries_win_and_defaults_may_be_one_name(tmp_path: Path) -> None:
    write(tmp_path / "config" / "a.yaml", f"{MINIMAL}env_vars: {{A: 'lit:a', B: 'lit:a'}}\n")
    write(tmp_path / "config" / "b.yaml", "env_vars: {B: 'lit:b'}\n")
    assert composed(tmp_path, "defaults: [a, b]\n").tree.get("env_vars") == {"A": "lit:a", "B": "lit:b"}
    assert composed(tmp_path, "defaults: a\n").tree.get("env_vars", "B") == "lit:a"


def test_a_users_group_wins_over_the_built_in_one(tmp_path: Path) -> None:
    write(tmp_path / "config" / "deployment" / "vllm.yaml", "defaults: [common]\ntype: generic\nport: 7\n")
    write(tmp_path / "config" / "deployment" / "common.yaml", "command: run\nserved_model_name: mine\nport: 6\n")
    text = "defaults: [{execution: local}, {deployment: vllm}]\n"
    tree = composed(tmp_path, text).tree
    assert tree.get("deployment", "command") == "run"
    assert tree.get("deployment", "port") == 7
    assert tree.origin(("deployment", "served_model_name")) == "config/deployment/common.yaml:2"


def test_a_group_can_be_placed_elsewhere_be_optional_or_nothing(tmp_path: Path) -> None:
    write(tmp_path / "config" / "site" / "here.yaml", "subproject: here\n")
    text = "defaults: [{site@execution: here}, {optional site: gone}, {site: null}, _self_]\n" + MINIMAL
    assert composed(tmp_path, text).tree.get("execution", "subproject") == "here"
    text = "defaults: [site/here@execution, base@evaluation, optional site/gone@execution, _self_]\n" + MINIMAL
    write(tmp_path / "config" / "base.yaml", "pre_cmd: ls\n")
    tree = composed(tmp_path, text).tree
    assert (tree.get("execution", "subproject"), tree.get("evaluation", "pre_cmd")) == ("here", "ls")


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        (
            "[{deployment: vlm}]",
            "config/c.yaml:1: defaults[0]: no 'vlm' in the group deployment (did you mean 'vllm'?)",
        ),
        ("[{server: x}]", "config/c.yaml:1: defaults[0]: no 'x' in the group server; looked in"),
        ("[gone]", "config/c.yaml:1: defaults[0]: no file"),
        ("[deployment/vllm]", "the group is written `deployment: vllm`"),
        (
            "[deployment/vlm@auxiliary_deployments.judge]",
            "c.yaml:1: defaults[0]: no 'vlm' in the group deployment (did",
        ),
        ("[_self_, _self_]", "config/c.yaml:1: defaults[1]: a second _self_"),
        ("[c]", "its defaults form a cycle: config/c.yaml → config/c.yaml"),
        ("[{override deployment: vllm}]", "`override deployment` is not supported"),
        ("[3]", "an entry must be a file's name, `group: name` or _self_"),
        ("{a: b}", "config/c.yaml:1: defaults: must be a list of groups and files"),
    ],
)
def test_a_wrong_defaults_list_is_named_with_its_line(tmp_path: Path, defaults: str, message: str) -> None:
    assert message in refused(tmp_path, f"defaults: {defaults}\n{MINIMAL}")


def test_the_defaults_of_a_type_are_there_without_a_list(tmp_path: Path) -> None:
    tree = composed(tmp_path, "execution: {type: slurm}\ndeployment: {type: vllm, served_model_name: m}\n").tree
    assert tree.get("execution", "walltime") == "01:00:00"
    assert tree.origin(("deployment", "gpu_memory_utilization")) == "default (deployment/vllm)"


def test_the_command_line_selects_groups_that_files_select_differently(tmp_path: Path) -> None:
    write(tmp_path / "config" / "base.yaml", "defaults: [{deployment: vllm}]\ndeployment: {served_model_name: m}\n")
    text = "defaults: [base, {execution: slurm/default}]\n"
    tree = composed(tmp_path, text, "deployment=sglang", "execution=local").tree
    assert (tree.get("deployment", "type"), tree.get("execution", "type")) == ("sglang", "local")
    assert tree.get("deployment", "image") == "lmsysorg/sglang:latest"


@pytest.mark.parametrize(
    ("text", "section", "expected"),
    [
        ("deployment: {type: none}\n", "execution", "one of slurm, local"),
        ("execution: {num_nodes: 1}\ndeployment: {type: none}\n", "execution", "{execution: slurm/default}, _self_]"),
        ("execution: {type: slurm}\n", "deployment", "one of generic, nim, none, sglang, trtllm, vllm"),
        ("execution: {type: slurm}\ndeployment: {image: x}\n", "deployment", "{deployment: vllm}, _self_]"),
    ],
)
def test_a_missing_type_is_reported_with_what_to_write(tmp_path: Path, text: str, section: str, expected: str) -> None:
    message = refused(tmp_path, text)
    assert f"{section}: missing key type: no group '{section}' is selected" in message
    assert expected in message


def test_a_profile_is_enough_to_know_where_to_run(tmp_path: Path) -> None:
    lay_out(tmp_path)
    tree = composed(tmp_path, "deployment: {type: none}\n", profile="BIG").tree
    assert tree.get("execution", "type") == "slurm"
    assert tree.origin(("execution", "type")) == "env.toml:6"
    assert tree.get("execution", "hostname") == "login.example.com"
    assert tree.origin(("execution", "hostname")) == "default (execution/slurm/default) ← env.toml:11"


def test_the_profile_goes_before_the_configuration(tmp_path: Path) -> None:
    lay_out(tmp_path)
    text = f"run: {{env: {{account: own, host: own}}, wandb: {{entity: null}}}}\n{MINIMAL}"
    tree = composed(tmp_path, text, "run.env.host=mine", "run.wandb.project=mine", profile="BIG").tree
    assert tree.get("run", "env", "account") == "acct"
    assert tree.get("run", "env", "host") == "mine"
    assert tree.origin(("run", "env", "host")) == COMMAND_LINE
    assert tree.get("run", "wandb") == {"entity": "team", "project": "mine", "base_url": None}


@pytest.mark.parametrize("key", PREFERRED)
def test_image_and_size_of_the_configuration_go_before_the_profile(tmp_path: Path, key: str) -> None:
    write(
        tmp_path / "env.toml", f'[p]\nexecutor = "slurm"\n{key} = {5 if key != "container_image" else repr("five")}\n'
    )
    value = "'6'" if key == "container_image" else 6
    text = f"run: {{env: {{{key}: {value}}}}}\n{MINIMAL}"
    assert str(composed(tmp_path, text, profile="p").tree.get("run", "env", key)) == "6"
    assert str(composed(tmp_path, text, f"run.env.{key}=7", profile="p").tree.get("run", "env", key)) == "7"
    assert str(composed(tmp_path, MINIMAL, profile="p").tree.get("run", "env", key)) in ("5", "five")


def test_mounts_add_up_and_variables_are_merged(tmp_path: Path) -> None:
    lay_out(tmp_path)
    text = f"run: {{env: {{mounts: ['/a:/a', '/lustre:/lustre'], env_vars: {{A: x, HF_HOME: /own}}}}}}\n{MINIMAL}"
    tree = composed(tmp_path, text, profile="BIG").tree
    assert tree.get("run", "env", "mounts") == ["/a:/a", "/lustre:/lustre"]
    assert tree.get("run", "env", "env_vars") == {"A": "x", "HF_HOME": "/lustre/hf"}
    kept = composed(tmp_path, text, "run.env.env_vars.HF_HOME=/mine", profile="BIG").tree
    assert kept.get("run", "env", "env_vars", "HF_HOME") == "/mine"


def test_the_image_has_two_names_and_one_value(tmp_path: Path) -> None:
    lay_out(tmp_path)
    text = f"run: {{env: {{container: own}}}}\n{MINIMAL}"
    for tree in (composed(tmp_path, text, profile="BIG").tree, composed(tmp_path, text).tree):
        assert tree.get("run", "env", "container") == tree.get("run", "env", "container_image") == "own"
    tree = composed(tmp_path, MINIMAL, profile="BIG").tree
    assert tree.get("run", "env", "container") == "registry.example.com/nemo:1"
    for config in (MINIMAL, text):
        tree = composed(tmp_path, config, "run.env.container=mine", profile="BIG").tree
        assert tree.get("run", "env", "container_image") == "mine"


def test_the_partition_depends_on_run_or_batch(tmp_path: Path) -> None:
    write(
        tmp_path / "env.toml", '[p]\nexecutor = "slurm"\npartition = "x"\nrun_partition = "r"\nbatch_partition = "b"\n'
    )
    attached = composed(tmp_path, MINIMAL, profile="p").tree
    detached = composed(tmp_path, MINIMAL, profile="p", detached=True).tree
    assert (attached.get("execution", "partition"), detached.get("execution", "partition")) == ("r", "b")
    assert detached.origin(("run", "env", "partition")) == "env.toml:5"


TASKS = MINIMAL + "evaluation: {tasks: [{name: a}, {name: evals/b.yaml}, {name: a}]}\n"


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_overrides_set_make_and_reach_tasks_by_name(tmp_path: Path, sign: str) -> None:
    tree = composed(
        tmp_path,
        TASKS,
        f"{sign}execution.mounts.evaluation={{/a: /b}}",
        f"{sign}evaluation.tasks.a.endpoint_type=chat",
        f"{sign}evaluation.tasks.evals/b.yaml.pre_cmd=true",
        f"{sign}evaluation.tasks.2.post_cmd=ls",
    ).tree
    assert tree.get("execution", "mounts", "evaluation") == {"/a": "/b"}
    assert tree.get("evaluation", "tasks") == [
        {"name": "a", "endpoint_type": "chat"},
        {"name": "evals/b.yaml", "pre_cmd": True},
        {"name": "a", "endpoint_type": "chat", "post_cmd": "ls"},
    ]
    assert tree.origin(("evaluation", "tasks", 0, "endpoint_type")) == COMMAND_LINE


NAMES = MINIMAL + "evaluation:\n  tasks:\n    - adding\n    - evals/b.yaml\n"


@pytest.mark.parametrize("task", ["adding", "0"])
def test_overrides_reach_tasks_of_which_only_the_name_is_written(tmp_path: Path, task: str) -> None:
    tree = composed(
        tmp_path, NAMES, f"evaluation.tasks.{task}.overrides.trials=2", f"evaluation.tasks.{task}.pre_cmd=ls"
    ).tree
    assert tree.get("evaluation", "tasks") == [
        {"name": "adding", "overrides": {"trials": 2}, "pre_cmd": "ls"},
        "evals/b.yaml",
    ]
    assert tree.origin(("evaluation", "tasks", 0, "name")) == tree.origin(("evaluation", "tasks", 0)) != COMMAND_LINE
    assert tree.origin(("evaluation", "tasks", 0, "overrides", "trials")) == COMMAND_LINE
    message = refused(tmp_path, NAMES, "evaluation.tasks.other.pre_cmd=ls")
    assert "there is no such entry; evaluation.tasks has adding, evals/b.yaml" in message
    assert "there is nothing to remove" in refused(tmp_path, NAMES, f"~evaluation.tasks.{task}.add")


def test_overrides_take_away(tmp_path: Path) -> None:
    tree = composed(tmp_path, MINIMAL, "~execution.max_walltime", "~execution.subproject=holdfast").tree
    assert "max_walltime" not in tree.data["execution"]
    assert "subproject" not in tree.data["execution"]
    assert "there is nothing to remove" in refused(tmp_path, MINIMAL, "~execution.nothing")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nonsense", "is not an override"),
        ("~", "is not an override"),
        ("evaluation.tasks.c.pre_cmd=x", "there is no such entry; evaluation.tasks has a, evals/b.yaml, a"),
        ("evaluation.tasks.9.pre_cmd=x", "there is no such entry"),
        ("execution.mounts=[", "the value is not valid YAML"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path: Path, override: str, message: str) -> None:
    assert message in refused(tmp_path, TASKS, override)


def test_references_keep_types_and_may_be_chained(tmp_path: Path) -> None:
    text = (
        MINIMAL
        + """\
env_vars:
  WHERE: lit:${execution.subproject}/x
export:
  local: {output_dir: "${oc.env:PLACE,/tmp}/out", job_dirs: "${execution.list}"}
target: {api_endpoint: {stream: "${oc.select:execution.flag,false}"}}
"""
    )
    tree = composed(tmp_path, text, "execution.list=[1, '${execution.num_nodes}']", "execution.flag=true").tree
    assert tree.get("env_vars", "WHERE") == "lit:holdfast/x"
    assert tree.get("export", "local", "output_dir") == "/tmp/out"
    assert tree.get("export", "local", "job_dirs") == [1, 1]
    assert tree.get("target", "api_endpoint", "stream") is True
    there = composed(tmp_path, text, "execution.list=[]", PLACE="/there/${x}").tree
    assert there.get("export", "local", "output_dir") == "/there/${x}/out"
    assert there.origin(("export", "local", "output_dir")) == "config/c.yaml:6 ← $PLACE"
    assert there.get("target", "api_endpoint", "stream") is False


def test_the_environment_is_the_one_that_is_handed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "outside")
    text = MINIMAL + "output_dir: ${oc.env:PLACE,none}\n"
    assert composed(tmp_path, text).tree.get("output_dir") == "none"
    assert composed(tmp_path, text, PLACE="inside").tree.get("output_dir") == "inside"


def test_a_shells_variable_is_left_to_the_shell(tmp_path: Path) -> None:
    text = MINIMAL + "output_dir: echo \\${HOME} $USER\n"
    assert composed(tmp_path, text).tree.get("output_dir") == "echo ${HOME} $USER"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("${run.env.hots}", "there is no key 'run.env.hots' (did you mean 'run.env.host'?)"),
        ("${HOME}", r"A shell's own variable is written \${HOME} or $NAME".replace("HOME", "NAME")),
        ("${oc.env:NOPE}", "the environment variable NOPE is not set: set it, or write ${oc.env:NOPE,default}"),
        ("${oc.env:HF_TOKEN}", "would write a secret into files and process lists"),
        ("${oc.env:${x}}", "the variable's name is written out"),
        ("${foo:1}", "unknown resolver 'foo'"),
        ("${art:model,path}", "names an artifact, which Holdfast does not have: write the path itself"),
        ("${auto_mount:git+https://x}", "is not supported: check the code out"),
        ("${broken", "cannot be parsed"),
    ],
)
def test_a_reference_that_leads_nowhere_is_named_with_its_line(tmp_path: Path, value: str, expected: str) -> None:
    message = refused(tmp_path, f"{MINIMAL}output_dir: '{value}'\n", HF_TOKEN="hush")
    assert message.startswith("config/c.yaml:3: output_dir: ")
    assert expected in message
    assert "hush" not in message


def test_variables_are_never_written_out(tmp_path: Path) -> None:
    text = MINIMAL + "evaluation:\n  env_vars:\n    A: ${oc.env:ANY}\n"
    message = refused(tmp_path, text, ANY="hush")
    assert message.startswith("config/c.yaml:5: evaluation.env_vars.A: ")
    assert "write host:ANY" in message
    assert "hush" not in message


def test_everything_mandatory_that_is_missing_is_listed_at_once(tmp_path: Path) -> None:
    text = "execution:\n  type: slurm\n  account: ???\ndeployment: {type: nim}\n"
    assert refused(tmp_path, text).splitlines() == [
        f"config/c.yaml{line}: {key}: must be given{why}: write it, or {key}=… on the command line"
        for line, key, why in (
            (":3", "execution.account", ""),
            ("", "deployment.image", ", deployment/nim needs it"),
            ("", "deployment.served_model_name", ", deployment/nim needs it"),
        )
    ]


def test_mandatory_keys_of_the_execution_are_filled_in_from_the_profile(tmp_path: Path) -> None:
    write(tmp_path / "env.toml", '[p]\nexecutor = "slurm"\nhost = "login"\nremote_job_dir = "/shared/me"\n')
    text = "execution:\n  hostname: ???\n  account: ???\n  output_dir: ???\ndeployment: {type: none}\n"
    assert refused(tmp_path, text, profile="p").splitlines() == [
        "config/c.yaml:3: execution.account: must be given: write it, or execution.account=… on the command line"
    ]
    tree = composed(tmp_path, text, "execution.account=a", "execution.output_dir=/mine", profile="p").tree
    assert (tree.get("execution", "hostname"), tree.origin(("execution", "hostname"))) == ("login", "env.toml:3")
    assert tree.get("execution", "output_dir") == "/mine"
    assert composed(tmp_path, text, "execution.account=a", profile="p").tree.get("execution", "output_dir") == (
        "/shared/me/evaluations"
    )


def test_a_path_is_never_built_from_an_unset_value(tmp_path: Path) -> None:
    write(tmp_path / "env.toml", '\n[p]\nexecutor = "slurm"\n')
    text = MINIMAL + "output_dir: ${run.env.remote_job_dir}/out\n"
    message = refused(tmp_path, text, profile="p")
    assert "config/c.yaml:3: output_dir: ${run.env.remote_job_dir}/out needs run.env.remote_job_dir" in message
    assert "write remote_job_dir into [p] (env.toml:2) or into run.env" in message


def test_a_configuration_can_be_previewed_without_a_profile(tmp_path: Path) -> None:
    configuration = composed(tmp_path, MINIMAL + "output_dir: ${run.env.remote_job_dir}/out\n")
    assert configuration.tree.get("output_dir") is None
    assert configuration.tree.get("execution", "hostname") is None
    (notice,) = configuration.notices
    assert "run.env.remote_job_dir" in notice
    assert "--run or --batch" in notice


def test_a_configuration_is_a_path_or_a_name_in_its_folder(tmp_path: Path) -> None:
    inside = write(tmp_path / "config" / "nano.yaml", MINIMAL)
    beside = write(tmp_path / "other.yml", MINIMAL)
    assert find_config("nano", tmp_path, {}) == inside
    assert find_config("other", tmp_path, {}) == beside
    assert find_config("config/nano.yaml", tmp_path, {}) == inside
    assert find_config("nano", tmp_path / "elsewhere", {"HOLDFAST_CONFIG_DIR": str(inside.parent)}) == inside
    with pytest.raises(
        UsageError, match=r"no configuration 'nanoo' \(did you mean 'nano'\?\).*\n.*There are: nano, other"
    ):
        find_config("nanoo", tmp_path, {})
    with pytest.raises(UsageError, match="no such file"):
        find_config("config/gone.yaml", tmp_path, {})


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, "- a\n").startswith("config/c.yaml: a configuration must be a mapping of keys")
    assert refused(tmp_path, "a: 1\nb: [\n").startswith("config/c.yaml:3: not valid YAML")


def test_a_missing_value_between_braces_says_how_to_write_it(tmp_path: Path) -> None:
    message = refused(tmp_path, "a: 1\nexecution: {account: ???}\n")
    assert message.startswith("config/c.yaml:2: not valid YAML")
    assert "write ??? in quotes, or put its key on a line of its own" in message
    assert "quotes" not in refused(tmp_path, "a: ???\nb: [c\n")


keys = st.sampled_from(["a", "b", "c"])
values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
layers = st.dictionaries(keys, values, max_size=3)


def layer(data: dict[str, Any], name: str) -> Tree:
    tree = Tree()
    for key, value in data.items():
        tree.put((key,), value, name)
    return tree


@given(layers, layers)
def test_merging_keeps_every_value_of_the_upper_layer(low: dict[str, Any], high: dict[str, Any]) -> None:
    before = copy.deepcopy((low, high))
    merged = layer(high, "high").over(layer(low, "low"))
    for location, value in leaves(high):
        if value != {}:  # an empty mapping says nothing
            assert merged.get(*location) == value
            assert merged.origin(location) == "high"
    assert {merged.origin(location) for location, _ in leaves(merged.data) if location} <= {"low", "high"}
    assert (low, high) == before


@given(layers, layers, layers)
def test_layers_are_idempotent_and_may_be_joined_in_any_grouping(one: Any, two: Any, three: Any) -> None:
    a, b, c = layer(one, "a"), layer(two, "b"), layer(three, "c")
    assert a.over(a).data == a.data
    assert c.over(b).over(a).data == c.over(b.over(a)).data or _mixed(a, b, c)


def _mixed(*trees: Tree) -> bool:
    """A value that is a mapping in one layer and none in another: then the grouping says what is replaced."""
    kinds: dict[Any, set[bool]] = {}
    for tree in trees:
        for location in tree.origins:
            kinds.setdefault(location, set()).add(isinstance(tree.get(*location), dict))
    return any(len(kind) == 2 for kind in kinds.values())


@given(st.text(alphabet="a$\\{}:.", max_size=12))
def test_an_escaped_text_means_itself(text: str) -> None:
    assert interpolate(Tree({"a": escape(text)}, {("a",): "x"}), {}, None).tree.data["a"] == text


def test_a_section_that_refers_to_itself_is_reported(tmp_path: Path) -> None:
    text = MINIMAL + "mine:\n  whole: ${oc.select:mine,1}\n"
    assert "config/c.yaml:4: mine.whole: ${oc.select:mine,1} contains itself" in refused(tmp_path, text)


@settings(max_examples=10)
@given(value=st.integers() | st.booleans() | st.none() | st.lists(st.integers(), max_size=2), detached=st.booleans())
def test_the_command_line_has_the_last_word_everywhere(
    tmp_path_factory: pytest.TempPathFactory, value: Any, detached: Any
) -> None:
    folder = tmp_path_factory.mktemp("c")
    write(folder / "env.toml", PROFILES)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    path = write(folder / "config" / "c.yaml", MINIMAL)
    for key in ("run.env.nodes", "run.env.account", "run.wandb.project", "execution.walltime", "execution.hostname"):
        profile = load_profile("BIG", folder, {})
        tree = compose(path, [f"{key}={text}"], profile, folder, {}, detached=detached).tree
        if value is not None or not key.startswith("run.env"):
            assert tree.get(*key.split(".")) == value
            assert tree.origin(tuple(key.split("."))) == COMMAND_LINE
