"""Translate waza's graders and checkpoints, with parameters next to the type or under `config`, and older kinds.

A grader that checks nothing is rejected later, by the schema. Files that graders name are read here and their contents
put into the grader, so that a grade's key depends on the contents and not on the place of the files.
"""

from __future__ import annotations

import difflib
import json
import os
import posixpath
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.plugins.waza.files import content
from holdfast.spec.grader_schema import TAKEN_NAMES, PatternBlock
from holdfast.spec.load_graders import GRADERS, grader_schema, names_file, rubric_text
from holdfast.spec.template import is_template

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from holdfast import Document, GraderBlock
    from holdfast.plugins.waza.findings import WazaFindings
    from holdfast.spec.document import Location

_OLDER: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "regex": ("text", {"must_match": "regex_match", "must_not_match": "regex_not_match"}),
    "keyword": (
        "text",
        {"must_contain": "contains", "keywords": "contains", "must_not_contain": "not_contains"},
    ),
    "llm": ("prompt", {"criteria": "rubric"}),
    "script": ("program", {}),
}
"""kinds of earlier versions: their current names and parameters"""

_NONE_OF_WAZAS: Final = {
    "tool": "waza has no grader `tool`: write `type: tool_calls` with required_tools or forbidden_tools",
}

_EXPECTED: Final = {
    "output_contains": "contains",
    "output_not_contains": "not_contains",
    "output_contains_any": "contains_any",
}

_CALL_PATTERNS: Final = ("command_pattern", "path_pattern", "skill_pattern")

_MEANINGS: Final[dict[str, dict[str, Any]]] = {
    "action_sequence": {"partial": True},
    "skill_invocation": {"partial": True},
    "tool_calls": {"distinct": False},
}
"""what graders do in waza, unlike in evals of Holdfast"""

_INTERPRETERS: Final = {".py": "python3", ".js": "node", ".sh": "sh"}


class TranslatedGrader(NamedTuple):
    """A grader as in an eval file of Holdfast, with the place of each part in waza's file."""

    fields: dict[str, Any]
    document: Document
    location: Location
    origins: dict[str, Location]

    @property
    def name(self) -> str:
        """The name in waza's file, or else the kind."""
        return str(self.fields.get("name") or self.fields["type"])


class Graders:
    """Translates graders one by one."""

    def __init__(self, findings: WazaFindings, folder: Path, judge: str | None, *, own_judge: bool) -> None:
        self._findings = findings
        self._folder = folder
        self._judge = judge
        self._own_judge = own_judge
        """the target is a model, which judges if no other model is named, or is not known yet"""

    def translate_all(self, document: Document, location: Location) -> list[TranslatedGrader]:
        """Translate a list of graders."""
        blocks = self._findings.blocks(document, location, "graders")
        graders = [self._translate(document, place, block) for place, block in blocks]
        return [grader for grader in graders if grader is not None]

    def translate_expected(self, document: Document) -> list[TranslatedGrader]:
        """Translate the checks under `expected`."""
        graders = []
        for key, parameter in _EXPECTED.items():
            if texts := self._findings.texts(document, ("expected", key)):
                place: Location = ("expected", key)
                fields = {"type": "text", "name": f"_{key}", parameter: [literal(text) for text in texts]}
                graders.append(TranslatedGrader(fields, document, place, {parameter: place}))
        return graders

    def _translate(self, document: Document, location: Location, raw: dict[str, Any]) -> TranslatedGrader | None:
        wrong = self._findings.wrong
        config = raw.get("config") or {}
        if not raw or not isinstance(config, dict):
            wrong(document, location, "a grader must be a mapping with a type, a name and a config")
            return None
        parameters = {key: (value, (*location, key)) for key, value in raw.items() if key != "config"}
        parameters |= {key: (value, (*location, "config", key)) for key, value in config.items()}
        parameters = {key: parameter for key, parameter in parameters.items() if parameter[0] is not None}
        if "ref" in parameters:
            wrong(document, parameters["ref"][1], "not supported: write the grader out instead of referring to it")
            return None
        kind = str(parameters.get("type", ("", location))[0])
        if kind in _NONE_OF_WAZAS:
            wrong(document, parameters["type"][1], _NONE_OF_WAZAS[kind])
            return None
        if kind in _OLDER:
            current, renamed = _OLDER[kind]
            self._findings.notice(document, parameters["type"][1], f"{kind!r} is an older kind, read as {current!r}")
            parameters = {renamed.get(key, key): parameter for key, parameter in parameters.items()}
            parameters["type"] = (current, parameters["type"][1])
        grader = TranslatedGrader(
            {key: value for key, (value, _) in parameters.items()},
            document,
            location,
            {key: place for key, (_, place) in parameters.items()},
        )
        return self._adapt(grader)

    def _adapt(self, grader: TranslatedGrader) -> TranslatedGrader | None:
        fields, kind = grader.fields, str(grader.fields.get("type", ""))
        weight = fields.get("weight")
        if isinstance(weight, int | float) and weight <= 0:
            del fields["weight"]  # in waza that means 1
        if "script" in fields:
            if not self._script(grader):
                return None
            kind = "program"
        adapt = {
            "program": self._program,
            "prompt": self._prompt,
            "behavior": self._no_limits,
            "diff": self._snapshots,
            "trigger": self._skill,
            "json_schema": self._schema,
            "tool_constraint": self._allowed,
        }.get(kind)
        if adapt is not None and not adapt(grader):
            return None
        if kind in GRADERS:  # unknown kinds are reported later, with the list of all kinds
            schema = grader_schema(kind)
            self._drop_unknown(grader, schema)
            if issubclass(schema, PatternBlock):
                fields["dialect"] = "re2"
            fields.update(_MEANINGS.get(kind, {}))
            for key in ("expect", "expect_tools", "reject_tools"):
                if key in fields and key in schema.model_fields:
                    fields[key] = _loose_calls(fields[key])
            for key in fields.keys() - {"type", "name"}:
                fields[key] = _literals(fields[key])
        return grader

    def _drop_unknown(self, grader: TranslatedGrader, model: type[GraderBlock]) -> None:
        """Drop parameters that the kind does not have; they are wrong if the grader checks nothing without them."""
        allowed = [field.alias or name for name, field in model.model_fields.items()]
        vacuous = bool(model.checks) and not any(key in grader.fields for key in model.checks)
        for key in [key for key in grader.fields if key not in allowed]:
            place = grader.origins[key]
            if vacuous:
                likely = difflib.get_close_matches(key, model.checks, 1)
                known = f"did you mean {likely[0]!r}?" if likely else f"it has {', '.join(model.checks)}"
                message = f"unknown parameter of {grader.fields['type']!r}, which checks nothing else ({known})"
                self._findings.wrong(grader.document, place, message)
            elif self._findings.unknown(grader.document, place, key, allowed):
                del grader.fields[key]

    def _script(self, grader: TranslatedGrader) -> bool:
        """Turn a script into a program that runs it."""
        fields = grader.fields
        name = str(fields.pop("script"))
        fields["type"] = "program"
        path = self._findings.find(name)
        if path is None or not path.is_file():
            self._findings.wrong(grader.document, grader.origins["script"], self._findings.nowhere(name))
            return False
        program = _INTERPRETERS.get(path.suffix)
        fields["command"] = program or name
        fields["args"] = [*([name] if program else []), *fields.get("args", [])]
        return True

    def _program(self, grader: TranslatedGrader) -> bool:
        """Make paths of a program's files relative to the eval's folder."""
        fields = grader.fields
        if isinstance(command := fields.get("command"), str) and "/" in command:
            fields["command"] = self._from_folder(command)
        if isinstance(arguments := fields.get("args"), list):
            fields["args"] = [self._from_folder(word) if isinstance(word, str) else word for word in arguments]
        return True

    def _from_folder(self, word: str) -> str:
        path = self._findings.find(word) if word and not word.startswith("/") else None
        if path is None or not path.is_file() or path.is_relative_to(self._folder):
            return word
        return os.path.relpath(path, self._folder)

    def _no_limits(self, grader: TranslatedGrader) -> bool:
        """Remove limits of 0: in waza they mean no limit, in Holdfast a limit of nothing."""
        for key in ("max_tool_calls", "max_tokens", "max_duration_ms"):
            if grader.fields.get(key) == 0:
                del grader.fields[key]
                self._findings.notice(grader.document, grader.origins[key], "0 is no limit, as in waza")
        return True

    def _snapshots(self, grader: TranslatedGrader) -> bool:
        """Read snapshots from the grader's `context_dir`; they are compared, never written."""
        folder = grader.fields.pop("context_dir", None)
        if grader.fields.pop("update_snapshots", False):
            self._findings.notice(
                grader.document, grader.origins["update_snapshots"], "snapshots are compared, never written"
            )
        contents: dict[str, Any] = {}
        for file in grader.fields.get("expected_files") or ():
            if isinstance(file, dict) and isinstance(name := file.get("snapshot"), str) and name:
                path = f"{folder}/{name}" if folder else name
                data = self._findings.read(grader.document, grader.origins["expected_files"], path)
                if data is None:
                    return False
                file["snapshot"] = _safe_name(path)
                contents[file["snapshot"]] = content(data)
        if contents:
            grader.fields["snapshots"] = contents
        return True

    def _skill(self, grader: TranslatedGrader) -> bool:
        """Read the SKILL.md of a trigger grader."""
        name = grader.fields.get("skill_path")
        if not isinstance(name, str) or not name:
            return True  # the schema reports what is missing
        place = grader.origins["skill_path"]
        data = self._findings.read(grader.document, place, name, inside="SKILL.md")
        if data is None:
            return False
        grader.fields.update(skill_path=_safe_name(name), skill=data.decode("utf-8", "replace"))
        grader.origins["skill"] = place
        return True

    def _schema(self, grader: TranslatedGrader) -> bool:
        """Read the schema from its file."""
        name = grader.fields.get("schema_file")
        if not isinstance(name, str) or not name or "schema" in grader.fields:
            return True
        place = grader.origins["schema_file"]
        data = self._findings.read(grader.document, place, name)
        if data is None:
            return False
        try:
            schema = json.loads(data)
        except (ValueError, RecursionError) as error:
            self._findings.wrong(grader.document, place, f"{name} is not a JSON Schema: {error}")
            return False
        if not isinstance(schema, dict):
            self._findings.wrong(grader.document, place, f"{name} is not a JSON Schema: it is not an object")
            return False
        del grader.fields["schema_file"]
        grader.fields["schema"] = schema
        grader.origins["schema"] = place
        return True

    def _allowed(self, grader: TranslatedGrader) -> bool:
        """Turn the names under `allow_only`, which waza compares as a whole, into patterns."""
        listed = grader.fields.get("allow_only")
        if not isinstance(listed, list):
            return True
        names = []
        for entry in listed:
            name = entry.get("tool") if isinstance(entry, dict) else entry
            if not isinstance(name, str) or not name.strip() or (isinstance(entry, dict) and entry.keys() != {"tool"}):
                message = f"must be a list of tools' names, as in [{{tool: bash}}], not {entry!r}"
                self._findings.wrong(grader.document, grader.origins["allow_only"], message)
                return False
            names.append(name.strip())
        grader.fields["allow_only"] = allow_only(names)
        return True

    def _prompt(self, grader: TranslatedGrader) -> bool:
        fields, wrong = grader.fields, self._findings.wrong
        if fields.pop("continue_session", False):
            fields["transcript"] = "all"
            message = "the judge sees the whole conversation, but not from inside the session"
            self._findings.notice(grader.document, grader.origins["continue_session"], message)
        if fields.pop("reasoning_effort", None) is not None:
            message = "is not handed to the judge; write `params: {reasoning_effort: …}` into the grader"
            self._findings.notice(grader.document, grader.origins["reasoning_effort"], message)
        rubric = fields.get("rubric")
        if isinstance(rubric, str) and re.fullmatch(r"[\w-]+", rubric):
            message = f"not supported: waza's own rubric {rubric!r}; write the rubric out, or name a file"
            wrong(grader.document, grader.origins["rubric"], message)
            return False
        if isinstance(rubric, str) and names_file(rubric):
            data = self._findings.read(grader.document, grader.origins["rubric"], rubric)
            if data is None:
                return False
            fields["rubric"] = rubric_text(data.decode("utf-8", "replace"))
            if not fields["rubric"]:
                wrong(grader.document, grader.origins["rubric"], f"checks nothing: {rubric} is empty")
                return False
        if self._judge is not None:
            fields.setdefault("model", self._judge)
        if not fields.get("model") and not self._own_judge:
            message = (
                "needs a model to judge with: add config.judge_model=MODEL to the command, or `judge_model` to `config`"
            )
            wrong(grader.document, grader.location, message)
            return False
        return True


def where_task(task: str) -> str:
    """Return the expression that is true for one task's row."""
    return f"id == {json.dumps(task, ensure_ascii=False)}"


def unique_names(graders: Sequence[tuple[str | None, str]]) -> list[str]:
    """Return unique names for graders, given by task (None: of the eval) and name. Ambiguous names get the task's id.

    waza stores results by name: a second grader of a name replaces the first.
    """
    counts = Counter(name for _, name in graders)
    unique: list[str] = []
    for task, name in graders:
        shared = name in TAKEN_NAMES or (task is not None and counts[name] > 1)
        chosen = base = f"{task or 'eval'}/{name}" if shared else name
        number = 1
        while chosen in unique:
            number += 1
            chosen = f"{base}#{number}"
        unique.append(chosen)
    return unique


def allow_only(names: list[str]) -> list[Any]:
    """Return patterns that match these tools' names and no others."""
    return [{"pattern": f"(?i)^{re.escape(name)}$"} for name in names]


def _loose_calls(calls: Any) -> Any:
    """Return expected calls with patterns as names that ignore case, like all patterns of waza's tool graders."""
    if not isinstance(calls, list):
        return calls  # the schema reports it
    loose = []
    for written in calls:
        call = dict(written) if isinstance(written, dict) else written
        if isinstance(call, dict):
            patterns = {key: call[key] for key in _CALL_PATTERNS if isinstance(call.get(key), str) and call[key]}
            call |= {key: f"(?i){pattern}" for key, pattern in patterns.items()}
            if isinstance(tool := call.get("tool"), str) and tool.strip():
                call["tool"] = {"pattern": f"(?i){tool.strip()}"}
        loose.append(call)
    return loose


def _safe_name(path: str) -> str:
    """Return a name for a file's content that stays inside its folder."""
    parts = posixpath.normpath(path).split("/")
    return "/".join(part for part in parts if part not in ("", "..", "~")) or path


def _literals(value: Any) -> Any:
    if isinstance(value, list):
        return [_literals(inner) for inner in value]
    if isinstance(value, dict):
        return {key: _literals(inner) for key, inner in value.items()}
    return literal(value) if isinstance(value, str) else value


def literal(text: str) -> str:
    """Escape a text that waza does not read as a template, so that Holdfast's templates repeat it literally."""
    if not is_template(text):
        return text
    return "{% raw %}" + text.replace("endraw", "{% endraw %}endraw{% raw %}") + "{% endraw %}"
