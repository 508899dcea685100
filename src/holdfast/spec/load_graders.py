"""Reads graders and the simulated user, each by the schema of its kind, with the models that they inherit.

A grader's text is never taken literally by oversight: a key either is rendered with the row, or refuses a text that
names a field. Literal braces are written as in Jinja2 in all keys; if they need no row, they are filled in when the
file is read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Union, cast, get_args, get_origin

from holdfast.errors import ConfigError, Problem
from holdfast.spec.document import file_inside
from holdfast.spec.grader_schema import TAKEN_NAMES, GraderBlock
from holdfast.spec.plugins import Registry
from holdfast.spec.providers import has_provider
from holdfast.spec.schema import Block, is_embedded, validate_block
from holdfast.spec.template import TemplateSyntaxError, is_template, template

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Set
    from pathlib import Path

    from holdfast.spec.document import Document, Location
    from holdfast.spec.eval_schema import ResponderBlock
    from holdfast.spec.grader_schema import PromptGrader

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
        "extract": "holdfast.graders.text:Extract",
        "ifeval": "holdfast.graders.ifeval:InstructionFollowing",
        "similarity": "holdfast.graders.text_metrics:Similarity",
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
"""Every kind of grader by its `type` in the eval file, as a class with a schema."""


def grader_schema(kind: str) -> type[GraderBlock]:
    """Return the schema of a kind of grader; raise ValueError, worded for users, for an unknown kind."""
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
    """Return True for a rubric that names a file."""
    return "\n" not in rubric and " " not in rubric and rubric.endswith((".md", ".yaml", ".yml", ".txt"))


def rubric_text(text: str) -> str:
    """Return the text of a rubric file without its front matter."""
    if text.startswith("---\n") and "\n---" in text[4:]:
        text = text[4:].split("\n---", 1)[1]
    return text.strip()


def with_judge(grader: PromptGrader, document: Document, location: Location, problems: list[Problem]) -> PromptGrader:
    """Return a judge with its model; the default is the target's model."""
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

    If it names a model with a provider's prefix, the provider is asked.
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


_AS_WRITTEN: Final = frozenset({"type", "name", "where"})
"""keys of graders whose values are names, or expressions without braces"""
LITERAL_BRACES: Final = "literal braces are written {% raw %}{{ }}{% endraw %}"

Refuse = Callable[["Location", str], None]
"""reports a text that is not allowed in its place"""


class GraderText(NamedTuple):
    """A template of a block."""

    location: Location
    """in the block"""
    source: str
    is_pattern: bool


def templates_in(block: Block) -> Iterator[GraderText]:
    """Yield the texts that are rendered with the row, in a block and the blocks inside it."""
    for name, field in type(block).model_fields.items():
        is_read, is_pattern = name in block.templates, name in block.regexes
        yield from _texts(getattr(block, name), (field.alias or name,), is_read=is_read, is_pattern=is_pattern)


def _texts(value: Any, place: Location, *, is_read: bool, is_pattern: bool) -> Iterator[GraderText]:
    if isinstance(value, str):
        if is_read:
            yield GraderText(place, value, is_pattern)
    elif isinstance(value, Block):
        for inner in templates_in(value):
            yield inner._replace(location=(*place, *inner.location))
    elif isinstance(value, dict | list | tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(part, (*place, key), is_read=is_read, is_pattern=is_pattern)


def is_fixed(block: Block) -> bool:
    """Return True for a block without templates."""
    return not any(is_template(text.source) for text in templates_in(block))


def settle_texts(schema: type[Block], keys: Mapping[str, Any], place: Location, refuse: Refuse) -> dict[str, Any]:
    """Return the keys of a block as written; in keys that are not templates, braces are filled in."""
    names = {field.alias or name: name for name, field in schema.model_fields.items()}
    settled = dict(keys)
    for key, value in keys.items():
        name = names.get(key)
        if name is None or key in _AS_WRITTEN or name in (*schema.expressions, *schema.as_written):
            continue  # the schema reports unknown keys
        instead = schema.instead.get(name, "a `code` grader sees the row as `sample`")
        reading = _Reading(name in schema.templates, instead, refuse)
        settled[key] = reading.settle(value, schema.model_fields[name].annotation, (*place, key))
    return settled


class _Reading(NamedTuple):
    """How the texts of one key are read."""

    is_rendered: bool
    instead: str
    refuse: Refuse

    def settle(self, value: Any, annotation: Any, place: Location) -> Any:
        if isinstance(value, str):
            return value if self.is_rendered or not is_template(value) else self._fill_in(value, place)
        if isinstance(value, dict):
            kinds = list(_members(annotation))
            block = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Block)), None)
            if block is not None:
                return settle_texts(block, value, place, self.refuse)
            inner = next((get_args(kind)[-1] for kind in kinds if get_origin(kind) is dict), None)
            for key in value:
                if is_template(str(key)):
                    self.refuse((*place, key), f"the name of a key is not a template; {LITERAL_BRACES}")
            return {key: self.settle(part, inner, (*place, key)) for key, part in value.items()}
        if isinstance(value, list):
            inner = next(
                (get_args(kind)[0] for kind in _members(annotation) if get_origin(kind) in (list, tuple)), None
            )
            return [self.settle(part, inner, (*place, number)) for number, part in enumerate(value)]
        return value

    def _fill_in(self, text: str, place: Location) -> str:
        try:
            compiled = template(text)
        except TemplateSyntaxError as error:
            self.refuse(place, f"not a valid template: {error.message}; {LITERAL_BRACES}")
            return text
        if compiled.names:
            shown = text if len(text) <= 60 else f"{text[:59]}…"
            self.refuse(
                place, f"is not a template, and {shown!r} would be taken literally: {self.instead}; {LITERAL_BRACES}"
            )
            return text
        return compiled.render({})


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation allows, without metadata for pydantic."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from _members(part)
    else:
        yield annotation
