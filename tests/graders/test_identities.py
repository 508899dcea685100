"""Identities of graders and targets: a part of keys on disk, so that none may change while its settings stay."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.canonical import digest
from holdfast.errors import ConfigError
from holdfast.graders.build import build_graders
from holdfast.plan.identity import identify
from tests.support.specs import load

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    "check.py": "import helper\n\n\ndef check(output, expected):\n    return helper.same(output, expected)\n",
    "helper.py": "def same(one, other):\n    return one == other\n",
    "agent.py": "import helper\n\n\ndef reply(prompt):\n    return prompt\n\n\ndef save(context):\n    return 1\n",
    "schema.json": '{"type": "object"}',
    "rubric.md": "---\nname: kind\n---\nIs it kind?\n",
    "SKILL.md": "---\nname: pie\ndescription: bakes pies. USE FOR: apple pie\n---\nBake a pie.\n",
    "expected.txt": "a pie\n",
    "check.sh": "#!/bin/sh\nexit 0\n",
    "nat.yml": "workflow: {_type: chat, llm_name: a}\nllms: {a: {_type: openai, model_name: m}}\n"
    "eval: {evaluators: {right: {_type: trajectory, llm_name: a}}}\n",
}
COLD = {"params": {"temperature": 0}}
"""what judges had by default when these identities were recorded"""

GRADERS: list[tuple[dict[str, Any], str]] = [
    ({"type": "exact"}, "sha256:b4b9ae37678e35942f11102600dbc1ae"),
    (
        {
            "type": "exact",
            "expected": ["a", "b"],
            "ignore_case": True,
            "transcript": "all",
            "weight": 2,
            "threshold": 0.5,
        },
        "sha256:7f7c2ce5ee715a4e4803149f8ab909eb",
    ),
    ({"type": "text", "contains": ["a"], "regex_match": ["b+"]}, "sha256:9623f5f2665edcc8167226055af69b18"),
    (
        {"type": "text", "regex_match": ["\\bb+$"], "dialect": "re2", "where": "id == 'a'"},
        "sha256:207920ae661d7faafb1448eb88d03c2d",
    ),
    ({"type": "choice"}, "sha256:38de3a096b68032f81dd8e0a9dcbdbb3"),
    ({"type": "number", "after": "answer:", "tolerance": 0.1}, "sha256:7bf7b8417f239b19226f9df2b4d7d666"),
    ({"type": "likelihood"}, "sha256:34abf3b47ede2e76600d8b698271ed8f"),
    (
        {"type": "likelihood", "expected": [0, "b"], "normalize": "chars", "choices": "[expected]", "weight": 0},
        "sha256:ff0d5ad676f0fff897ead844160e9676",
    ),
    ({"type": "extract"}, "sha256:78e424ff4e60e6d197ce0222041f0206"),
    (
        {
            "type": "extract",
            "filters": [{"regex": "#### (.+)", "group": -1}, "strip", "take_first"],
            "ignore_case": True,
            "ignore": [",", r"\$"],
        },
        "sha256:4bb9f2a85dc65aa2047e1c9fbe490487",
    ),
    (
        {"type": "lm_eval", "task": "gsm8k", "metric": "exact_match", "version": "0.4.13"},
        "sha256:4412cf0641afadc65f7033296a89297a",
    ),
    ({"type": "ifeval"}, "sha256:de710033ae50f54f9aec203da6b23f3f"),
    (
        {"type": "ifeval", "mode": "loose", "instructions": "doc.instructions"},
        "sha256:f9dd92ca4d5714030739a9d3a22bf25c",
    ),
    (
        {"type": "prompt", "rubric": "Is it right?", "range": [1, 10], "model": "judge", **COLD},
        "sha256:b41b8ba74ec6ecf431e1c8d81f94081b",
    ),
    ({"type": "similarity", "method": "jaro_winkler"}, "sha256:cdd2bda6c3935fef82db0ab8265f3877"),
    ({"type": "math", "timeout": 20}, "sha256:c91927c7486a8e7802d4d7e48d5fc91a"),
    ({"type": "math", "on_timeout": "error"}, "sha256:6e58da16af4a2da7b4bd5c8a83ec4050"),
    ({"type": "json_schema", "schema_file": "schema.json"}, "sha256:263e77cfa6b0bbfcaacf35b592eff222"),
    ({"type": "json_schema", "schema": {"type": "array"}, "extract": True}, "sha256:3020965689883ca7cdc559682ab1b679"),
    ({"type": "python", "function": "check.py:check", "params": {}}, "sha256:11c0f14a413b92698add289a5f14ff3c"),
    (
        {"type": "python", "function": "check.py:check", "expected": "x", "version": "2"},
        "sha256:aae9318e9f7bf5782c0f81d259d26a33",
    ),
    ({"type": "prompt", "rubric": "Is it right?", **COLD}, "sha256:e9550b330bd7e8b4521a23acbad87594"),
    (
        {"type": "prompt", "rubric": "rubric.md", "model": "judge", "base_url": "http://127.0.0.1:1/v1", **COLD},
        "sha256:5d52923ff3fdfe9d3adf8ecfdda09c0f",
    ),
    (
        {
            **COLD,
            "type": "prompt",
            "prompt": "Check it.",
            "transcript": "all",
            "model": "judge",
            "base_url": "http://127.0.0.1:1/v1",
        },
        "sha256:04681ea454ce48bba34c9eb7cfe1847b",
    ),
    ({"type": "trigger", "skill_path": "SKILL.md", "mode": "positive"}, "sha256:4cc5d964302c47588f7cc21f48bd1845"),
    ({"type": "trigger", "skill": "Bake a pie.", "mode": "negative"}, "sha256:67ec30f52a5d210a7891ee3efd6cbc04"),
    ({"type": "nat", "config_file": "nat.yml", "evaluator": "right"}, "sha256:935e20b5e87e610bfea3935ed9cc0804"),
    ({"type": "nat", "evaluator": {"_type": "ragas"}, "range": [1, 5]}, "sha256:f98cc06179895855253c7f936b2bbe1c"),
    ({"type": "bleu", "tokenize": "char"}, "sha256:8e4ae5ea31b6bb18110d2bd8ceb07e4b"),
    ({"type": "chrf", "word_order": 2}, "sha256:e40f9892449b9e50414c669c2684fdd5"),
    ({"type": "rouge", "stem": True}, "sha256:8019cf1b9c5bca2a136408274555c9fd"),
    ({"type": "char_f1", "ignore_case": True}, "sha256:1fb47076956324d58240983329d58589"),
    ({"type": "wer"}, "sha256:dfa3daf605b129308c68561d36e4b842"),
    ({"type": "cer"}, "sha256:0cd39b778db680410891dd87a96332de"),
    ({"type": "behavior", "max_tokens": 100, "required_tools": ["a"]}, "sha256:8c8ce18aba9aa46929c99d7590764dee"),
    (
        {"type": "action_sequence", "expected_actions": ["a", "b"], "matching_mode": "in_order_match"},
        "sha256:7cc8b24370ce37bee795b435c7b43f18",
    ),
    (
        {"type": "skill_invocation", "required_skills": ["pie"], "mode": "any_order"},
        "sha256:fac0b546c301c52880602aa76cae3443",
    ),
    (
        {"type": "tool_calls", "expect": [{"tool": "read", "args": {"path": {"regex": "a.*"}}}], "max_calls": 3},
        "sha256:52af835849613bce6201616022914664",
    ),
    (
        {"type": "tool_constraint", "expect_tools": [{"tool": "bash", "command_pattern": "ls"}]},
        "sha256:af99aeb62bd61648b8113f9f54a3878a",
    ),
    ({"type": "tool_constraint", "allow_only": []}, "sha256:12f9a06a7e2e4a0cba43bf267eadce6d"),
    (
        {"type": "file", "must_exist": ["a.txt"], "content_patterns": [{"path": "a.txt", "must_match": ["x"]}]},
        "sha256:d4f95f68a34857011571fdeba937b556",
    ),
    (
        {"type": "diff", "expected_files": [{"path": "a.txt", "snapshot": "expected.txt"}]},
        "sha256:047be2248c53b5c5cdb47067e5996f97",
    ),
    (
        {"type": "diff", "expected_files": [{"path": "a.txt", "snapshot": "b.txt"}], "snapshots": {"b.txt": "text"}},
        "sha256:69c7a9b67875861ae16f0c5abf48214f",
    ),
    (
        {"type": "program", "command": "./check.sh", "args": ["check.py", "{{ id }}"]},
        "sha256:3c7ca43d3d11250b4de7129cf9dd5ac9",
    ),
    ({"type": "code", "assertions": ["len(output) > 1"]}, "sha256:4b35d95201db8d5c29a282f6777f3f7f"),
    (
        {"type": "code", "language": "javascript", "assertions": ["output.length"], "on_timeout": "error"},
        "sha256:2152575e4b4c49fc00ba4b6effcdaefa",
    ),
]
TARGETS: list[tuple[dict[str, Any], str]] = [
    (
        {"model": "m", "base_url": "http://127.0.0.1:1/v1", "params": {"temperature": 0}},
        "sha256:86518af00a4ca7627fe36f7ed309f3c3",
    ),
    (
        {"model": "m", "base_url": "http://127.0.0.1:1/v1", "params_from": "{'seed': 1}"},
        "sha256:55233bf5191a513531fa4492e724ab18",
    ),
    (
        {
            "model": "m",
            "base_url": ["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"],
            "identity": "url",
            "version": "2",
        },
        "sha256:50c0ec09a00c04fd49395cbf01be8459",
    ),
    (
        {
            "model": "m",
            "base_url": "http://127.0.0.1:1/v1",
            "tools": [
                {"python": "agent.py:reply"},
                {"mcp": {"command": ["python", "agent.py"]}},
                {"scripted": {"name": "t", "responses": [{"result": 1}]}},
            ],
        },
        "sha256:b9280f2f1d04ad343ca98182e10176bf",
    ),
    ({"python": "agent.py:reply", "params": {"a": 1}}, "sha256:aa518d210111aa6a377139e34a06746c"),
    (
        {
            "python": "agent.py:reply",
            "state": {"save": "agent.py:save", "restore": "check.py:check"},
            "tools": [{"python": "helper.py:same"}],
        },
        "sha256:8893e31c809d0f0d1f06b51c704c16a8",
    ),
    (
        {
            "http": "http://127.0.0.1:1/run?key=x",
            "request": {"q": "{{ prompt }}"},
            "response": "a",
            "stream_end": "end",
        },
        "sha256:287bc7df7d6049e1b1316674794738c1",
    ),
    (
        {"command": ["python3", "agent.py", "{{ prompt }}"], "stdin": "{{ prompt }}", "path": ["bin"]},
        "sha256:d7ce24026684a55facd00dd87bf42272",
    ),
    (
        {"nat": "nat.yml", "override": {"llms.a.model_name": "n"}, "version": "1"},
        "sha256:5882a4a6deb5282994c1a9a1b8603fdb",
    ),
    ({"mock": "waza"}, "sha256:702de1a6b849b1312f72c6044e30ec29"),
]

LIKELIHOODS: dict[str, Any] = {"continuations": "[question]", "target": {"model": "m", "api": "completions"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "check.sh").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(("block", "expected"), GRADERS, ids=[block["type"] for block, _ in GRADERS])
def test_a_graders_identity_is_what_it_was(folder: Path, block: dict[str, Any], expected: str) -> None:
    keys: dict[str, Any] = LIKELIHOODS if block["type"] == "likelihood" else {}
    if block["type"] == "ifeval":
        keys = {"samples": [{"question": "?", "instruction_id_list": [], "kwargs": [], "doc": {"instructions": []}}]}
    identified = identify(load(folder, graders=[block], workspace={}, **keys))
    (identity,) = identified.contents.graders.values()
    assert digest(identity) == expected


@pytest.mark.parametrize(("block", "expected"), TARGETS, ids=[next(iter(block)) for block, _ in TARGETS])
def test_a_targets_identity_is_what_it_was(folder: Path, block: dict[str, Any], expected: str) -> None:
    assert digest(identify(load(folder, target=block)).contents.target) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "sha256:89c6437c45b892ff0e5270c106752d82"),
        ({"params": {"temperature": 1}, "params_from": "{'seed': 1}"}, "sha256:89c6437c45b892ff0e5270c106752d82"),
        (
            {"likelihood": {"truncate": "left", "max_length": 2048, "prefix": "<s>"}},
            "sha256:df65711c3d301c2f05a9a44ba421914d",
        ),
        ({"tokenizer": "schema.json"}, "sha256:2107c85adf705edc62d155e44cc40b22"),
    ],
)
def test_the_identity_of_a_model_that_is_asked_for_likelihoods(
    folder: Path, settings: dict[str, Any], expected: str
) -> None:
    spec = load(folder, **{**LIKELIHOODS, "target": {**LIKELIHOODS["target"], **settings}})
    assert digest(identify(spec).contents.target) == expected


def test_every_kind_of_grader_is_pinned() -> None:
    from holdfast.spec.load_graders import GRADERS as KINDS

    assert {block["type"] for block, _ in GRADERS} == {*KINDS}


def test_another_version_of_lm_eval_grades_nothing(folder: Path) -> None:
    block = {"type": "lm_eval", "task": "gsm8k", "metric": "exact_match"}
    spec = load(folder, graders=[{**block, "version": "0.4.9"}])
    with pytest.raises(ConfigError, match=r"grades with lm-eval 0\.4\.9, and [\d.]+ is installed"):
        build_graders(spec)
    (identity,) = identify(load(folder, graders=[block])).contents.graders.values()
    assert identity["version"] == version("lm-eval")
