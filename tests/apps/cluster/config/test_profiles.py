"""Profiles: `env.toml` is found as documented, inherited, and everything wrong in it is named by file and line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.apps.cluster.config.profiles import (
    OTHER_KEYS,
    RESERVED,
    find_env_file,
    load_profile,
    load_wandb,
    squash_problem,
)
from holdfast.apps.cluster.config.schema import ProfileBlock, walltime, walltime_seconds
from holdfast.errors import UsageError
from tests.support.clusters import PROFILES, write

if TYPE_CHECKING:
    from pathlib import Path


def profile(folder: Path, text: str, name: str = "p") -> Any:
    write(folder / "env.toml", text)
    return load_profile(name, folder, {})


def refused(folder: Path, text: str, name: str = "p") -> str:
    with pytest.raises(UsageError) as caught:
        profile(folder, text, name)
    return str(caught.value)


def test_a_profile_inherits_and_overrides_what_it_extends(tmp_path: Path) -> None:
    loaded = profile(tmp_path, PROFILES + '\n[child]\nextends = "BIG"\npartition = "short"\n', "child")
    assert loaded.fields.account == "acct"
    assert (loaded.fields.partition, loaded.fields.nodes) == ("short", 2)
    assert loaded.values["env_vars"] == {"HF_HOME": "/lustre/hf"}
    assert loaded.origins["account"] == "env.toml:7"
    assert loaded.origins["nodes"] == "env.toml:18"
    assert loaded.origins["partition"] == f"env.toml:{len(PROFILES.splitlines()) + 4}"
    assert (loaded.wandb.project, loaded.wandb.entity) == ("nano", "team")
    assert loaded.wandb_origins["entity"] == "env.toml:3"


def test_every_key_of_the_table_is_read(tmp_path: Path) -> None:
    text = """
        [p]
        executor = "slurm"
        account = "a"
        partition = "x"
        run_partition = "r"
        batch_partition = "b"
        nodes = 1
        ntasks_per_node = 1
        nproc_per_node = 8
        gpus_per_node = 8
        cpus_per_task = 16
        time = "1-00:00:00"
        mem = "0"
        exclusive = true
        container_image = "i"
        container = "i"
        mounts = ["/a:/b", "/c", "/d:/e:ro"]
        lustre_mount = "/lustre:/lustre"
        env_vars = {A = "b", N = 1}
        startup_commands = ["echo"]
        setup_lines = "module load x"
        run_command = "bash"
        packager = "git"
        packager_include_pattern = "*.py"
        runtime = "docker"
        tunnel = "ssh"
        host = "h"
        user = "u"
        identity = "~/.ssh/id"
        remote_job_dir = "/r"
        python = "/env/bin/python"
        build_partition = "cpu"
        build_time = "00:30:00"
        build_image = "b"
        build_cache_dir = "/c"
        build_include_gpus = false
        build_gpus_per_node = 1
        """
    loaded = profile(tmp_path, text)
    assert set(loaded.values) == set(ProfileBlock.known_keys())
    assert all(loaded.origins.values())
    assert loaded.fields.time == "24:00:00"


def test_keys_for_other_executors_are_ignored(tmp_path: Path) -> None:
    keys = "\n".join(f'{key} = "hush"' for key in OTHER_KEYS)
    loaded = profile(tmp_path, f'[p]\nexecutor = "local"\n{keys}\n')
    assert loaded.values == {"executor": "local"}


@pytest.mark.parametrize("executor", ["docker", "dgxcloud", "lepton"])
def test_other_executors_are_refused_by_name(tmp_path: Path, executor: str) -> None:
    message = refused(tmp_path, f'[p]\nexecutor = "{executor}"\n')
    assert message.startswith("env.toml:2: executor: ")
    assert "not supported; one of slurm, local" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[p]\nexecutor = "slurm"\nacount = "a"\n', "env.toml:3: acount: unknown key (did you mean 'account'?)"),
        ('[p]\nexecutor = "slurm"\n\nnodes = "two"\n', "env.toml:4: nodes: "),
        ('[p]\nexecutor = "slurm"\nnodes = 0\n', "env.toml:3: nodes: should be greater than or equal to 1, not 0"),
        ('[p]\nexecutor = "slrum"\n', "env.toml:2: executor: unknown executor 'slrum' (did you mean 'slurm'?)"),
        ('[p]\naccount = "a"\n', 'env.toml:1: [p]: executor is missing: write executor = "slurm" or "local"'),
        ('[p]\nexecutor = "slurm"\ntime = "soon"\n', "env.toml:3: time: a time must be written as"),
        ('[p]\nexecutor = "slurm"\nmounts = ["/a:/b:/c:/d"]\n', "env.toml:3: mounts[0]: "),
        ('[p]\nexecutor = "slurm"\ntunnel = "ssh"\n', 'env.toml:1: [p]: host is missing: tunnel = "ssh" needs it'),
        ('[p]\nexecutor = "slurm"\ntunnel = "ssh"\nhost = "h"\n', "[p]: remote_job_dir is missing"),
        (
            '[p]\nextends = "q"\n[qq]\nexecutor = "slurm"\n',
            "env.toml:2: p.extends: no profile 'q' (did you mean 'qq'?)",
        ),
        ('[p]\nextends = "q"\n[q]\nnodse = 1\n', "env.toml:4: nodse: unknown key (did you mean 'nodes'?)"),
        ('[p]\nexecutor = "slurm"\ncontainer = "a"\ncontainer_image = "b"\n', "mean the same; give one of them"),
        ('[wandb]\nprojcet = "x"\n[p]\nexecutor = "local"\n', "env.toml:2: wandb.projcet: unknown key"),
        ('[p]\nexecutor = "slurm\n', "env.toml:2: not valid TOML"),
        ("", "env.toml: no profile 'p'; it has no profiles"),
        ('[q]\nexecutor = "local"\n[r]\nexecutor = "local"\n', "env.toml: no profile 'p'; profiles there: q, r"),
    ],
)
def test_mistakes_are_reported_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    problems = refused(tmp_path, '[p]\nexecutor = "slurm"\nnodes = 0\nacount = "a"\ntunnel = "ssh"\n').splitlines()
    assert len(problems) == 4


def test_a_circle_of_profiles_is_shown(tmp_path: Path) -> None:
    message = refused(tmp_path, '[p]\nextends = "q"\n[q]\nextends = "r"\n[r]\nextends = "q"\n')
    assert message == "env.toml:2: p.extends: forms a cycle: p → q → r → q"


@pytest.mark.parametrize("name", RESERVED)
def test_a_reserved_table_is_no_profile(tmp_path: Path, name: str) -> None:
    message = refused(tmp_path, f'[{name}]\nproject = "x"\n[q]\nexecutor = "local"\n', name)
    assert message == f"env.toml:1: [{name}] is not a profile; profiles there: q"


def test_another_profile_may_be_wrong(tmp_path: Path) -> None:
    assert profile(tmp_path, '[p]\nexecutor = "local"\n[q]\nnonsense = 1\n').name == "p"


def test_the_file_is_the_nearest_one_but_not_beyond_the_project(tmp_path: Path) -> None:
    inner = tmp_path / "project" / "deep"
    inner.mkdir(parents=True)
    outer = write(tmp_path / "env.toml", "")
    assert find_env_file(inner, {}) == outer
    write(tmp_path / "project" / "pyproject.toml", "")
    assert find_env_file(inner, {}) is None
    beside = write(tmp_path / "project" / "env.toml", "")
    assert find_env_file(inner, {}) == beside


@pytest.mark.parametrize("variable", ["HOLDFAST_ENV_FILE", "NEMOTRON_ENV_FILE"])
def test_a_variable_names_the_file(tmp_path: Path, variable: str) -> None:
    write(tmp_path / "env.toml", "")
    other = write(tmp_path / "other.toml", "")
    assert find_env_file(tmp_path, {variable: "other.toml"}) == other
    with pytest.raises(UsageError, match=rf"\${variable} points to .*gone.toml, which does not exist"):
        find_env_file(tmp_path, {variable: "gone.toml"})


def test_ours_goes_before_the_other_variable(tmp_path: Path) -> None:
    one = write(tmp_path / "one.toml", "")
    assert find_env_file(tmp_path, {"NEMOTRON_ENV_FILE": "two.toml", "HOLDFAST_ENV_FILE": "one.toml"}) == one


def test_a_missing_file_is_reported_with_what_to_write(tmp_path: Path) -> None:
    write(tmp_path / "pyproject.toml", "")
    with pytest.raises(UsageError) as caught:
        load_profile("p", tmp_path, {})
    assert "no env.toml in" in str(caught.value)
    assert 'a table [p] and executor = "slurm" or "local"' in str(caught.value)


def test_wandb_is_read_without_a_profile(tmp_path: Path) -> None:
    write(tmp_path / "env.toml", PROFILES)
    block, places = load_wandb(tmp_path, {})
    assert (block.project, places["project"]) == ("nano", "env.toml:2")


def test_line_numbers_belong_to_keys_and_not_to_similar_text(tmp_path: Path) -> None:
    text = '[p]\nsetup_lines = """\n[q]\naccount = 1\n"""\nexecutor = "local"\n"user" = "u"\n'
    loaded = profile(tmp_path, text)
    assert loaded.origins == {"setup_lines": "env.toml:2", "executor": "env.toml:6", "user": "env.toml:7"}


def test_why_images_cannot_be_squashed(tmp_path: Path) -> None:
    assert "--run or --batch" in (squash_problem(None) or "")
    lacking = profile(tmp_path, '\n[p]\nexecutor = "slurm"\nhost = "h"\n')
    assert squash_problem(lacking) == (
        'env.toml:2: [p] cannot import images: it lacks tunnel = "ssh", remote_job_dir = "…"'
    )
    assert squash_problem(profile(tmp_path, PROFILES, "BIG")) is None


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("04:00:00", 14400),
        ("30", 1800),
        (30, 1800),
        ("10:30", 630),
        ("1-0", 86400),
        ("2-01:30", 178200),
        ("4h", 14400),
        ("1h30m", 5400),
    ],
)
def test_times_as_slurm_writes_them(written: str | int, seconds: int) -> None:
    assert walltime_seconds(written) == seconds


@pytest.mark.parametrize("written", ["soon", "", "1:2:3:4", "00:00:00", "-1"])
def test_an_invalid_time_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="a time"):
        walltime_seconds(written)


@given(st.integers(1, 10**7))
def test_a_time_written_out_is_the_same_time(seconds: int) -> None:
    text = walltime(f"{seconds}s")
    assert walltime_seconds(text) == seconds
    assert walltime(text) == text
