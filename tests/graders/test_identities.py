"""Identities of graders and targets: a part of keys on disk, so that none may change while its settings stay."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.canonical import digest
from holdfast.errors import ConfigError
from holdfast.graders.build import build_graders
from holdfast.plan.identity import identify
from holdfast.spec.document import read_value
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
GRADERS = read_value(r"""
34765f406fdc26a74d4d5a64bf7dcfa9: {type: exact}
c26af400b356799bad952aafc5f47c39:
  {type: exact, expected: [a, b], ignore_case: true, transcript: all, weight: 2, threshold: 0.5}
afaf2c92ff9f4d27ef70e194b1b190c6: {type: text, contains: [a], regex_match: ['b+']}
9b11babb2c1f30a31e7c0e05ce459804: {type: text, regex_match: ['\bb+$'], dialect: re2, where: "id == 'a'"}
2e9ed287a40a4b4473364c86c3429ce4: {type: choice}
a2370619fc9a4ab2ead48b474bfa547e: {type: number, after: 'answer:', tolerance: 0.1}
a55cbc77e16fd08c7d1f5dd6a013e63f: {type: likelihood}
62c67ef5856c94375c0961fcf5179737:
  {type: likelihood, expected: [0, b], normalize: chars, choices: '[expected]', weight: 0}
946308876c20d6598cba18cddffa03be: {type: extract}
958f9f6a4491e2985402508480c7ad02:
  {type: extract, filters: [{regex: '#### (.+)', group: -1}, strip, take_first], ignore_case: true,
   ignore: [',', '\$']}
09033087ddaffbdd07f6c2413a82cc6d: {type: lm_eval, task: gsm8k, metric: exact_match, version: '0.4.13'}
b4e61010d0a3f62dc40cbba293b49f8c: {type: ifeval}
18defdbe5341252cd6bbc4fe66732c68: {type: ifeval, mode: loose, instructions: doc.instructions}
2554dace32b9c6613934b9108ee95506: {type: prompt, rubric: Is it right?, range: [1, 10], model: judge}
9446477591abaf020f5ee215ffd03adf: {type: similarity, method: jaro_winkler}
5d7e00096ed87aaccff5c7a8c6660949: {type: math, timeout: 20}
d06749292dd790205eb80919d534caa0: {type: math, on_timeout: error}
359958fd91f91532ded26e303c35155b: {type: json_schema, schema_file: schema.json}
ad12b72aa527aa4e798ae8142a244592: {type: json_schema, schema: {type: array}, extract: true}
9f1420febf5ad39691b31df2a662b308: {type: python, function: 'check.py:check', params: {}}
dd971684a87319821d420a7dcb88a818: {type: python, function: 'check.py:check', expected: x, version: '2'}
d1a6ca054d1537e8ad78b57d42fcf230: {type: prompt, rubric: Is it right?}
3252dd7367ac1df86f3bc1431ac5491f: {type: prompt, rubric: rubric.md, model: judge, base_url: http://127.0.0.1:1/v1}
add75099c2e3ae4c3fbb3cdc9a708e1e:
  {type: prompt, prompt: Check it., transcript: all, model: judge, base_url: http://127.0.0.1:1/v1}
4cc5d964302c47588f7cc21f48bd1845: {type: trigger, skill_path: SKILL.md, mode: positive}
67ec30f52a5d210a7891ee3efd6cbc04: {type: trigger, skill: Bake a pie., mode: negative}
3ecac97cc13fe6b785f01c80722fdee1: {type: nat, config_file: nat.yml, evaluator: right}
b0f4f9f24812983a045f085dfe439b4e: {type: nat, evaluator: {'_type': ragas}, range: [1, 5]}
08f34c2b72a0d3a7639d868054432022: {type: bleu, tokenize: char}
c443fc7cf2284c425b373ebc34ebb99f: {type: chrf, word_order: 2}
8c4c0e4073cfc6170390fc2fc191caa7: {type: rouge, stem: true}
83bb0ee9c8819ee495d24f3ddfb86c46: {type: char_f1, ignore_case: true}
6013f10ee28030186b0025a50f0c56d3: {type: wer}
25d778f7d27b11d41fa7df89ec49097d: {type: cer}
d0f684e94d4b28c4da08a2b8708f4d13: {type: behavior, max_tokens: 100, required_tools: [a]}
4ef600dbef1fe022589013cb4e6b980b: {type: action_sequence, expected_actions: [a, b], matching_mode: in_order_match}
e9c5ec51df23ae68af68970f44cf6001: {type: skill_invocation, required_skills: [pie], mode: any_order}
355d9ea3cc0a97e10b7fcebe5c7c1e04:
  {type: tool_calls, expect: [{tool: read, args: {path: {regex: 'a.*'}}}], max_calls: 3}
d849aaf7aa74ec9a904e4c7c287c3e1a: {type: tool_constraint, expect_tools: [{tool: bash, command_pattern: ls}]}
ee94c20c52114f35c25db7caaa7774b7: {type: tool_constraint, allow_only: []}
1f94235f69d535a6fda6a90b94d59f8b:
  {type: file, must_exist: [a.txt], content_patterns: [{path: a.txt, must_match: [x]}]}
a02be6bc65f03f40e179ca27171b94c0: {type: diff, expected_files: [{path: a.txt, snapshot: expected.txt}]}
41902ec225e7b2b8cc8e8e6e26a38a06:
  {type: diff, expected_files: [{path: a.txt, snapshot: b.txt}], snapshots: {b.txt: text}}
37ef934fb586eaba9158e01833dccbf0: {type: program, command: ./check.sh, args: [check.py, '{{ id }}']}
e9d3dfe36ac8af300b2547e4ab870d8b: {type: code, assertions: ['len(output) > 1']}
dac19108ec1ed23eb7bc64edb9ef6b67: {type: code, language: javascript, assertions: [output.length], on_timeout: error}
""")
"""blocks as users write them, by the digests of their identities"""
TARGETS = read_value(r"""
86518af00a4ca7627fe36f7ed309f3c3: {model: m, base_url: http://127.0.0.1:1/v1, params: {temperature: 0}}
55233bf5191a513531fa4492e724ab18: {model: m, base_url: http://127.0.0.1:1/v1, params_from: "{'seed': 1}"}
50c0ec09a00c04fd49395cbf01be8459:
  {model: m, base_url: [http://127.0.0.1:1/v1, http://127.0.0.1:2/v1], identity: url, version: '2'}
b9280f2f1d04ad343ca98182e10176bf:
  {model: m, base_url: http://127.0.0.1:1/v1, tools: [{python: 'agent.py:reply'},
   {mcp: {command: [python, agent.py]}}, {scripted: {name: t, responses: [{result: 1}]}}]}
aa518d210111aa6a377139e34a06746c: {python: 'agent.py:reply', params: {a: 1}}
8893e31c809d0f0d1f06b51c704c16a8:
  {python: 'agent.py:reply', state: {save: 'agent.py:save', restore: 'check.py:check'},
   tools: [{python: 'helper.py:same'}]}
287bc7df7d6049e1b1316674794738c1:
  {http: http://127.0.0.1:1/run?key=x, request: {q: '{{ prompt }}'}, response: a, stream_end: end}
d7ce24026684a55facd00dd87bf42272: {command: [python3, agent.py, '{{ prompt }}'], stdin: '{{ prompt }}', path: [bin]}
5882a4a6deb5282994c1a9a1b8603fdb: {nat: nat.yml, override: {llms.a.model_name: n}, version: '1'}
702de1a6b849b1312f72c6044e30ec29: {mock: waza}
""")

LIKELIHOODS: dict[str, Any] = {"continuations": "[question]", "target": {"model": "m", "api": "completions"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "check.sh").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("pin", GRADERS, ids=lambda pin: GRADERS[pin]["type"])
def test_a_graders_identity_stays_the_same(folder: Path, pin: str) -> None:
    block = GRADERS[pin]
    keys: dict[str, Any] = LIKELIHOODS if block["type"] == "likelihood" else {}
    if block["type"] == "ifeval":
        keys = {"samples": [{"question": "?", "instruction_id_list": [], "kwargs": [], "doc": {"instructions": []}}]}
    identified = identify(load(folder, graders=[block], workspace={}, **keys))
    (identity,) = identified.contents.graders.values()
    assert digest(identity) == f"sha256:{pin}"


@pytest.mark.parametrize("pin", TARGETS, ids=lambda pin: next(iter(TARGETS[pin])))
def test_a_targets_identity_stays_the_same(folder: Path, pin: str) -> None:
    assert digest(identify(load(folder, target=TARGETS[pin])).contents.target) == f"sha256:{pin}"


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

    assert {block["type"] for block in GRADERS.values()} == {*KINDS}


def test_another_version_of_lm_eval_grades_nothing(folder: Path) -> None:
    block = {"type": "lm_eval", "task": "gsm8k", "metric": "exact_match"}
    spec = load(folder, graders=[{**block, "version": "0.4.9"}])
    with pytest.raises(ConfigError, match=r"grades with lm-eval 0\.4\.9, and [\d.]+ is installed"):
        build_graders(spec)
    (identity,) = identify(load(folder, graders=[block])).contents.graders.values()
    assert identity["version"] == version("lm-eval")
