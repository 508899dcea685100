"""waza's `config` block, with the defaults of `.waza.yaml`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.spec.document import read_document
from holdfast.versions import parse_version

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from holdfast import Document
    from holdfast.plugins.waza.findings import WazaFindings

_KNOWN: Final = (
    *("trials_per_task", "timeout_seconds", "parallel", "workers", "executor", "model", "judge_model"),
    *("group_by", "skill_directories", "required_skills", "disabled_skills", "instruction_files"),
    "inject_skill_body",
)
_IGNORED: Final = {
    "first_event_timeout_seconds": "is of waza's executor; timeout_seconds holds for each turn",
    "fail_fast": "every task is run: one failed task says nothing about the others",
    "reasoning_effort": "is of waza's executor; for a model write target.params.reasoning_effort=…",
    "judge_reasoning_effort": "is of waza's executor; write `params: {reasoning_effort: …}` into the prompt grader",
    "trigger_skill_routing": "is of waza's executor",
    "mcp_servers": "is of waza's executor; no server is started, give the target its tools (see docs/eval-file.md)",
    "cache": "every finished trial is kept, and an error never is",
}
_DEFAULTS: Final = {
    "timeout": "timeout_seconds",
    "workers": "workers",
    "parallel": "parallel",
    "judgeModel": "judge_model",
    "model": "model",
}


def version_problem(data: Mapping[str, Any]) -> str | None:
    """Return a problem with the version of an eval: supported are 1.x, and 2.0 with a `scenario`."""
    written, scenario = data.get("schemaVersion"), data.get("scenario")
    if scenario is not None and (not isinstance(scenario, str) or not scenario.strip()):
        return "`scenario` names the workflow, and is not empty"
    if scenario is not None and str(written) != "2.0":
        return f'a scenario eval has schemaVersion "2.0", not {written!r}'
    if written in (None, ""):
        return None
    try:
        version = parse_version(written)
    except ValueError as error:
        return str(error)
    if version.major != 1 and scenario is None:
        with_scenario = ", and 2.0 with a `scenario`" if version.major == 2 else ""
        return f"waza's evals are read in versions 1.x{with_scenario}, not {version}"
    return None


@dataclass(frozen=True)
class Config:
    """The values of the block that have an effect here."""

    trials: int
    turn_timeout: float | None
    concurrency: int | None
    executor: str
    model: str | None
    judge: str | None
    group_by: str | None
    skills: tuple[str, ...]
    """folders that hold skills"""
    required_skills: tuple[str, ...]
    injects: bool
    """the skill's text is put before the conversation"""


def project_folder(folder: Path) -> Path:
    """Return the nearest folder above an eval that is a project's root, or else the eval's folder."""
    for place in (folder, *folder.parents):
        if (place / ".waza.yaml").is_file() or (place / ".git").exists():
            return place
    return folder


def read_config(findings: WazaFindings, document: Document) -> Config:
    """Read the block and check each key."""
    block = findings.block(document, (), "config")
    findings.keys(document, ("config",), (*_KNOWN, "max_attempts"), ignored=_IGNORED)
    if isinstance(block.get("max_attempts"), int) and block["max_attempts"] > 1:
        message = "a wrong answer is never asked again until it is right; errors are, by limits.retries"
        findings.notice(document, ("config", "max_attempts"), message)
    defaults, skills = _defaults(findings)
    values = {**defaults, **{key: value for key, value in block.items() if value is not None}}

    def number(key: str, least: int) -> int | None:
        value = values.get(key)
        return value if value is None or findings.is_number(value, document, ("config", key), least) else None

    workers = number("workers", 0) or None
    directories = findings.texts(document, ("config", "skill_directories"))
    if document.data.get("scenario") and not document.data.get("skill") and not directories:
        skills = ()  # a scenario without a skill looks for none
    parallel = values.get("parallel")
    disabled = findings.texts(document, ("config", "disabled_skills"))
    return Config(
        trials=number("trials_per_task", 1) or 1,
        turn_timeout=number("timeout_seconds", 1),
        concurrency=1 if parallel is False else workers,
        executor=str(values.get("executor") or "copilot-sdk"),
        model=_text(values.get("model")),
        judge=_text(values.get("judge_model")),
        group_by=_text(values.get("group_by")),
        skills=(*directories, *skills),
        required_skills=tuple(findings.texts(document, ("config", "required_skills"))),
        injects=values.get("inject_skill_body") is not False
        and "*" not in disabled
        and document.data.get("skill") not in disabled,
    )


def _defaults(findings: WazaFindings) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read from `.waza.yaml` defaults for keys of `config`, and the folders of skills."""
    path = findings.root / ".waza.yaml"
    if not path.is_file() or re.fullmatch(rb"(\s*(#.*|---)?\n?)*", path.read_bytes()):
        return {}, ()
    project = read_document(path)
    block = findings.block(project, (), "defaults")
    values = {key: block[name] for name, key in _DEFAULTS.items() if block.get(name) is not None}
    if values:
        findings.notice(project, ("defaults",), f"defaults taken from .waza.yaml: {', '.join(values)}")
    if findings.block(project, (), "graders"):
        findings.notice(project, ("graders",), "is not read; a program grader has its own timeout")
    skills = findings.block(project, (), "paths").get("skills")
    return values, (str(findings.root / skills),) if isinstance(skills, str) else ()


def _text(value: Any) -> str | None:
    return str(value) if value else None
