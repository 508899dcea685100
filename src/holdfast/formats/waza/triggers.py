"""`trigger_tests.yaml`: prompts that must trigger the skill, and prompts that must not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from holdfast.spec.document import read_document

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.formats.waza.findings import WazaFindings
    from holdfast.spec.document import Document

SHOULD: Final = "trigger_accuracy/should_trigger"
SHOULD_NOT: Final = "trigger_accuracy/should_not_trigger"

_LISTS: Final = {"should_trigger_prompts": True, "should_not_trigger_prompts": False}


def trigger_rows(
    findings: WazaFindings, path: Path, *, measurable: bool
) -> tuple[Document, list[dict[str, Any]]] | None:
    """Return the prompts as samples; None if there are none, or if the target cannot use a skill."""
    if not path.is_file():
        return None
    document = read_document(path)
    findings.keys(document, (), ("skill", *_LISTS))
    rows = list(_rows(findings, document))
    if not rows:
        return None
    if not measurable:
        message = f"{len(rows)} prompts are left out: whether a skill is used can only be seen of an agent that says so"
        findings.notice(document, (), f"{message} (target.python, target.http or target.command)")
        return None
    return document, rows


def trigger_graders(skill: str) -> list[dict[str, Any]]:
    """Return the graders of the samples with prompts for triggers."""
    return [
        {
            "type": "skill_invocation",
            "name": SHOULD,
            "required_skills": [skill],
            "mode": "any_order",
            "where": "should_trigger is defined and should_trigger",
        },
        {
            "type": "skill_invocation",
            "name": SHOULD_NOT,
            "forbidden_skills": [skill],
            "where": "should_trigger is defined and not should_trigger",
        },
    ]


def _rows(findings: WazaFindings, document: Document) -> Iterator[dict[str, Any]]:
    number = 0
    for key, should_trigger in _LISTS.items():
        listed = document.data.get(key) or []
        for place, entry in enumerate(listed if isinstance(listed, list) else []):
            prompt = entry.get("prompt") if isinstance(entry, dict) else entry
            if not isinstance(prompt, str) or not prompt:
                findings.wrong(document, (key, place), "needs a prompt")
                continue
            number += 1
            confidence = entry.get("confidence") if isinstance(entry, dict) else None
            yield {
                "id": f"trigger/{number}",
                "name": f"trigger/{number}",
                "prompt": prompt,
                "follow_ups": [],
                "files": {},
                "should_trigger": should_trigger,
                "confidence": confidence or "high",
            }
