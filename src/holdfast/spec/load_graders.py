"""Reads graders and the simulated user, each by the schema of its kind, with the models that they inherit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from holdfast.errors import ConfigError, Problem
from holdfast.spec.document import file_inside
from holdfast.spec.grader_schema import TAKEN_NAMES, GraderBlock
from holdfast.spec.grader_texts import settle_texts
from holdfast.spec.plugins import Registry
from holdfast.spec.providers import has_provider
from holdfast.spec.schema import is_embedded
from holdfast.spec.validation import validate_block

if TYPE_CHECKING:
    from collections.abc import Set
    from pathlib import Path

    from holdfast.spec.document import Document, Location
    from holdfast.spec.eval_schema import ResponderBlock
    from holdfast.spec.judge_schema import PromptGrader

GRADERS = Registry(
    "holdfast.graders",
    "grader type",
    {
        "exact": "holdfast.graders.text:Exact",
        "text": "holdfast.graders.text:Text",
        "choice": "holdfast.graders.choice:Choice",
        "number": "holdfast.graders.number:Number",
        "likelihood": "holdfast.graders.likelihood:Likelihood",
        "lm_eval": "holdfast.graders.lm_eval:LmEval",
        "extract": "holdfast.graders.extract:Extract",
        "ifeval": "holdfast.graders.ifeval:InstructionFollowing",
        "similarity": "holdfast.graders.similarity:Similarity",
        "math": "holdfast.graders.maths:Mathematics",
        "json_schema": "holdfast.graders.json_schema:JsonSchema",
        "python": "holdfast.graders.python:PythonCheck",
        "prompt": "holdfast.graders.judge:Judge",
        "trigger": "holdfast.graders.trigger:Trigger",
        "bleu": "holdfast.graders.text_metrics:Bleu",
        "chrf": "holdfast.graders.text_metrics:Chrf",
        "rouge": "holdfast.graders.text_metrics:Rouge",
        "char_f1": "holdfast.graders.text_metrics:CharF1",
        "wer": "holdfast.graders.text_metrics:ErrorRate",
        "cer": "holdfast.graders.text_metrics:ErrorRate",
        "behavior": "holdfast.graders.tool_graders:Behavior",
        "action_sequence": "holdfast.graders.tool_graders:ActionSequence",
        "skill_invocation": "holdfast.graders.tool_graders:SkillInvocation",
        "tool_calls": "holdfast.graders.tool_graders:ToolCalls",
        "tool_constraint": "holdfast.graders.tool_graders:ToolConstraint",
        "file": "holdfast.graders.files:File",
        "diff": "holdfast.graders.files:Diff",
        "program": "holdfast.graders.programs:Program",
        "code": "holdfast.graders.programs:Code",
    },
)
"""Every kind of grader, by its `type` in the eval file: a class that owns its schema."""


def grader_schema(kind: str) -> type[GraderBlock]:
    """Return the schema of a kind of grader; raises ValueError, worded for users, where there is none."""
    schema = getattr(GRADERS.load(kind), "schema", None)
    if not (isinstance(schema, type) and issubclass(schema, GraderBlock)):
        message = f"the class of the grader type {kind!r} has no `schema` that is a holdfast.GraderBlock"
        raise ValueError(message)  # noqa: TRY004 - users see it as a wrong value in their file
    return schema


def read_graders(
    data: Any, base: Location, document: Document, folder: Path, problems: list[Problem]
) -> list[GraderBlock]:
    """Read a list of graders, each by the schema of its kind; adds to `problems`."""
    graders: list[GraderBlock] = []
    seen: dict[str, int] = {}
    for number, raw in enumerate(data if isinstance(data, list) else []):
        location: Location = (*base, number)
        if not isinstance(raw, dict):
            continue  # the schema of the whole file reports it
        config = raw.get("config") or {}
        if not isinstance(config, dict):
            problems.append(
                Problem(document.where((*location, "config")), "must be a mapping of the grader's parameters")
            )
            continue
        fields = {**raw, **config}
        fields.pop("config", None)
        kind = fields.get("type")
        if not kind:
            problems.append(Problem(document.where((*location, "type")), f"needs a type: {GRADERS.describe()}"))
            continue
        try:
            schema = grader_schema(str(kind))
        except ValueError as error:
            problems.append(Problem(document.where((*location, "type")), str(error)))
            continue
        fields["name"] = str(fields.get("name") or kind)
        nested = config.keys()

        def refuse(place: Location, message: str, base: Location = location, nested: Set[str] = nested) -> None:
            inner = ("config", *place) if place[0] in nested else place
            problems.append(Problem(document.where((*base, *inner)), message))

        count = len(problems)
        fields = settle_texts(schema, fields, (), refuse)
        grader = None
        if len(problems) == count:
            grader = cast("GraderBlock | None", validate_block(schema, fields, location, document, problems))
        if fields["name"] in TAKEN_NAMES:
            message = f"{fields['name']!r} is reserved for reports; give the grader another name"
            problems.append(Problem(document.where((*location, "name")), message))
        if fields["name"] in seen:
            problems.append(Problem(document.where(location), f"duplicate grader name {fields['name']!r}"))
        seen[fields["name"]] = number
        if grader is not None:
            graders.append(GRADERS.load(str(kind)).resolve(grader, document, location, folder, problems))
    return graders


def with_rubric(
    grader: PromptGrader, document: Document, location: Location, folder: Path, problems: list[Problem]
) -> PromptGrader:
    """Return the grader with the text of the file that its rubric names."""
    rubric = grader.rubric
    if rubric is None or not names_file(rubric):
        return grader
    where = document.where((*location, "rubric"))
    try:
        text = file_inside(folder, rubric, where).decode("utf-8")
    except UnicodeDecodeError as error:
        problems.append(Problem(where, f"{rubric} is not a text: {error}"))
        return grader
    except ConfigError as error:
        problems.extend(error.problems)
        return grader
    text = rubric_text(text)
    if not text:
        problems.append(Problem(where, f"checks nothing: {rubric} is empty"))
    return grader.model_copy(update={"rubric": text})


def names_file(rubric: str) -> bool:
    """Return True for a rubric that is the name of a file, not the text itself."""
    return "\n" not in rubric and " " not in rubric and rubric.endswith((".md", ".yaml", ".yml", ".txt"))


def rubric_text(text: str) -> str:
    """Return the text of a rubric file without its front matter."""
    if text.startswith("---\n") and "\n---" in text[4:]:
        text = text[4:].split("\n---", 1)[1]
    return text.strip()


def with_judge(grader: PromptGrader, document: Document, location: Location, problems: list[Problem]) -> PromptGrader:
    """Return a judge with its model; the default is the target's, where the target is a model."""
    target = document.data.get("target")
    target = target if isinstance(target, dict) else {}
    if grader.model is None and "model" not in target:
        message = (
            "needs a `model` to judge with, since the target is not a model: add `model: NAME`, or type "
            f"graders.{grader.name}.model=NAME after the command"
        )
        problems.append(Problem(document.where(location), message))
        return grader
    return grader.model_copy(update=_endpoint(grader, target))


def with_judges(grader: PromptGrader, document: Document, location: Location, problems: list[Problem]) -> PromptGrader:
    """Return a judge with its model, or several judges, each with its model."""
    judges = [with_judge(judge, document, location, problems) for judge in grader.judges()]
    return judges[0] if len(judges) * grader.votes == 1 else grader.with_seats(judges)


def with_player(responder: ResponderBlock | None, document: Document, problems: list[Problem]) -> ResponderBlock | None:
    """Return a simulated user with its model; the default is the target's."""
    if responder is None or responder.python is not None:
        return responder
    target = document.data.get("target")
    target = target if isinstance(target, dict) else {}
    if responder.model is None and "model" not in target:
        message = "needs a `model` that plays the user; on the command line: responder.model=MODEL"
        problems.append(Problem(document.where(("responder",)), message))
        return responder
    return responder.model_copy(update=_endpoint(responder, target))


def _endpoint(block: PromptGrader | ResponderBlock, target: dict[str, Any]) -> dict[str, Any]:
    """Return the model and endpoint of a judge or a simulated user; the defaults are the target's.

    A model of its own, with the prefix of a provider, is asked there.
    """
    assert not isinstance(block.model, list)
    name = block.model or str(target["model"])
    if "model" not in target or is_embedded(name) or is_embedded(str(target["model"])):
        return {"model": name}
    if block.model is not None and has_provider(name, target.get("base_url")):
        return {"model": name}
    return {
        "model": name,
        "base_url": block.base_url or target.get("base_url"),
        "api_key_env": block.api_key_env or target.get("api_key_env"),
        "api": block.api or (target.get("api") if block.base_url is None else None),
    }
