"""waza's graders and checkpoints as ours: parameters beside the type or under `config`, and the older kinds too.

A grader that checks nothing is left for our own models to reject. Files that graders name are read here and their
contents put into the grader, so that a grade's key depends on what they say and not on where they were found.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.formats.waza.files import content
from holdfast.formats.waza.findings import at
from holdfast.formats.waza.gotext import literal
from holdfast.spec.grader_schema import TAKEN_NAMES, PatternBlock
from holdfast.spec.load_graders import GRADERS, grader_schema, names_file, rubric_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from holdfast.formats.waza.findings import Findings
    from holdfast.spec.document import Document, Location
    from holdfast.spec.grader_schema import GraderBlock

_OLDER: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "regex": ("text", {"must_match": "regex_match", "must_not_match": "regex_not_match"}),
    "keyword": (
        "text",
        {"must_contain": "contains", "keywords": "contains", "must_not_contain": "not_contains"},
    ),
    "llm": ("prompt", {"criteria": "rubric"}),
    "script": ("program", {}),
}
"""kinds of earlier versions: what they are called today, and their parameters"""

_NONE_OF_WAZAS: Final = {
    "tool": "waza has no grader `tool`: write `type: tool_calls` with required_tools or forbidden_tools",
}

_EXPECTED: Final = {
    "output_contains": "contains",
    "output_not_contains": "not_contains",
    "output_contains_any": "contains_any",
}

_INTERPRETERS: Final = {".py": "python3", ".js": "node", ".sh": "sh"}


class Made(NamedTuple):
    """A grader as our eval file would have it, and where each part of it stands in waza's."""

    fields: dict[str, Any]
    document: Document
    location: Location
    origins: dict[str, Location]

    @property
    def name(self) -> str:
        """As waza's file has it, else its kind."""
        return str(self.fields.get("name") or self.fields["type"])


class Graders:
    """Translates graders one by one."""

    def __init__(self, findings: Findings, folder: Path, judge: str | None, *, own_judge: bool) -> None:
        self._findings = findings
        self._folder = folder
        self._judge = judge
        self._own_judge = own_judge
        """the target is a model, which judges where no other is named, or is not known yet"""

    def all_of(self, document: Document, location: Location) -> list[Made]:
        """A list of graders."""
        listed = at(document, location[:-1]).get(str(location[-1]))
        if listed is None:
            return []
        if not isinstance(listed, list):
            self._findings.wrong(document, location, "is a list of graders")
            return []
        made = [self._one(document, (*location, number)) for number in range(len(listed))]
        return [grader for grader in made if grader is not None]

    def expected(self, document: Document) -> list[Made]:
        """The checks under `expected`."""
        made = []
        for key, parameter in _EXPECTED.items():
            if texts := self._findings.texts(document, ("expected", key)):
                place: Location = ("expected", key)
                fields = {"type": "text", "name": f"_{key}", parameter: [literal(text) for text in texts]}
                made.append(Made(fields, document, place, {parameter: place}))
        return made

    def _one(self, document: Document, location: Location) -> Made | None:
        wrong = self._findings.wrong
        raw = at(document, location)
        config = raw.get("config") or {}
        if not raw or not isinstance(config, dict):
            wrong(document, location, "a grader is a mapping with a type, a name and a config")
            return None
        given = {key: (value, (*location, key)) for key, value in raw.items() if key != "config"}
        given |= {key: (value, (*location, "config", key)) for key, value in config.items()}
        given = {key: found for key, found in given.items() if found[0] is not None}
        if "ref" in given:
            wrong(document, given["ref"][1], "not supported: write the grader out instead of referring to it")
            return None
        kind = str(given.get("type", ("", location))[0])
        if kind in _NONE_OF_WAZAS:
            wrong(document, given["type"][1], _NONE_OF_WAZAS[kind])
            return None
        if kind in _OLDER:
            today, renamed = _OLDER[kind]
            self._findings.notice(document, given["type"][1], f"{kind!r} is an older kind, read as {today!r}")
            given = {renamed.get(key, key): found for key, found in given.items()}
            given["type"] = (today, given["type"][1])
        made = Made(
            {key: value for key, (value, _) in given.items()},
            document,
            location,
            {key: place for key, (_, place) in given.items()},
        )
        return self._in_our_words(made)

    def _in_our_words(self, made: Made) -> Made | None:
        fields, kind = made.fields, str(made.fields.get("type", ""))
        weight = fields.get("weight")
        if isinstance(weight, int | float) and weight <= 0:
            del fields["weight"]  # there it means 1
        if "script" in fields:
            if not self._script(made):
                return None
            kind = "program"
        if kind == "program":
            self._program(made)
        if kind == "prompt" and not self._prompt(made):
            return None
        if kind == "behavior":
            self._no_limits(made)
        if kind == "diff" and not self._snapshots(made):
            return None
        if kind == "trigger" and not self._skill(made):
            return None
        if kind == "json_schema" and not self._schema(made):
            return None
        if kind == "tool_constraint" and not self._allowed(made):
            return None
        if kind in GRADERS:  # of the others it is said later, with all kinds there are
            schema = grader_schema(kind)
            self._drop_unknown(made, schema)
            if issubclass(schema, PatternBlock):
                fields["dialect"] = "re2"
            for key in schema.templates:
                if key in fields:
                    fields[key] = _literals(fields[key])
        return made

    def _drop_unknown(self, made: Made, model: type[GraderBlock]) -> None:
        """Parameters that the kind does not have; a grader that checks nothing without them is refused later."""
        known = [field.alias or name for name, field in model.model_fields.items()]
        for key in [key for key in made.fields if key not in known]:
            if self._findings.unknown(made.document, made.origins[key], key, known):
                del made.fields[key]

    def _script(self, made: Made) -> bool:
        """Turn a script into a program that runs it."""
        fields = made.fields
        name = str(fields.pop("script"))
        fields["type"] = "program"
        path = self._findings.find(name)
        if path is None or not path.is_file():
            self._findings.wrong(made.document, made.origins["script"], self._findings.nowhere(name))
            return False
        program = _INTERPRETERS.get(path.suffix)
        fields["command"] = program or name
        fields["args"] = [*([name] if program else []), *fields.get("args", [])]
        return True

    def _program(self, made: Made) -> None:
        """Name a program's files from the eval's folder, wherever they were found."""
        fields = made.fields
        if isinstance(command := fields.get("command"), str) and "/" in command:
            fields["command"] = self._from_folder(command)
        if isinstance(arguments := fields.get("args"), list):
            fields["args"] = [self._from_folder(word) if isinstance(word, str) else word for word in arguments]

    def _from_folder(self, word: str) -> str:
        path = self._findings.find(word) if word and not word.startswith("/") else None
        if path is None or not path.is_file() or path.is_relative_to(self._folder):
            return word
        return os.path.relpath(path, self._folder)

    def _no_limits(self, made: Made) -> None:
        """There 0 means that there is no limit, here that there is nothing to spend."""
        for key in ("max_tool_calls", "max_tokens", "max_duration_ms"):
            if made.fields.get(key) == 0:
                del made.fields[key]
                self._findings.notice(made.document, made.origins[key], "0 is no limit, as in waza")

    def _snapshots(self, made: Made) -> bool:
        """Read snapshots, which lie in the grader's `context_dir`; they are compared and never written."""
        folder = made.fields.pop("context_dir", None)
        if made.fields.pop("update_snapshots", False):
            self._findings.notice(
                made.document, made.origins["update_snapshots"], "snapshots are compared, never written"
            )
        contents: dict[str, Any] = {}
        for file in made.fields.get("expected_files") or ():
            if isinstance(file, dict) and isinstance(name := file.get("snapshot"), str) and name:
                path = f"{folder}/{name}" if folder else name
                data = self._findings.read(made.document, made.origins["expected_files"], path)
                if data is None:
                    return False
                file["snapshot"] = _plain(path)
                contents[file["snapshot"]] = content(data)
        if contents:
            made.fields["snapshots"] = contents
        return True

    def _skill(self, made: Made) -> bool:
        """Read the SKILL.md of a trigger grader."""
        name = made.fields.get("skill_path")
        if not isinstance(name, str) or not name:
            return True  # our own model names what is missing
        place = made.origins["skill_path"]
        data = self._findings.read(made.document, place, name, inside="SKILL.md")
        if data is None:
            return False
        made.fields.update(skill_path=_plain(name), skill=data.decode("utf-8", "replace"))
        made.origins["skill"] = place
        return True

    def _schema(self, made: Made) -> bool:
        """Read the schema that a file holds."""
        name = made.fields.get("schema_file")
        if not isinstance(name, str) or not name or "schema" in made.fields:
            return True
        place = made.origins["schema_file"]
        data = self._findings.read(made.document, place, name)
        if data is None:
            return False
        try:
            schema = json.loads(data)
        except (ValueError, RecursionError) as error:
            self._findings.wrong(made.document, place, f"{name} is not a JSON Schema: {error}")
            return False
        if not isinstance(schema, dict):
            self._findings.wrong(made.document, place, f"{name} is not a JSON Schema: it is not an object")
            return False
        del made.fields["schema_file"]
        made.fields["schema"] = schema
        made.origins["schema"] = place
        return True

    def _allowed(self, made: Made) -> bool:
        """Turn the names under `allow_only`, which waza compares as a whole, into patterns; no name allows no tool."""
        listed = made.fields.get("allow_only")
        if not isinstance(listed, list):
            return True
        names = []
        for entry in listed:
            name = entry.get("tool") if isinstance(entry, dict) else entry
            if not isinstance(name, str) or not name.strip() or (isinstance(entry, dict) and entry.keys() != {"tool"}):
                said = f"is a list of tools' names, as in [{{tool: bash}}], not {entry!r}"
                self._findings.wrong(made.document, made.origins["allow_only"], said)
                return False
            names.append(name.strip())
        made.fields["allow_only"] = allow_only(names)
        return True

    def _prompt(self, made: Made) -> bool:
        fields, wrong = made.fields, self._findings.wrong
        if fields.pop("continue_session", False):
            fields["transcript"] = "all"
            said = "the judge sees the whole conversation, but not from inside the session"
            self._findings.notice(made.document, made.origins["continue_session"], said)
        if fields.pop("reasoning_effort", None) is not None:
            said = "is not handed to the judge; write `params: {reasoning_effort: …}` into the grader"
            self._findings.notice(made.document, made.origins["reasoning_effort"], said)
        rubric = fields.get("rubric")
        if isinstance(rubric, str) and re.fullmatch(r"[\w-]+", rubric):
            said = f"not supported: waza's own rubric {rubric!r}; write the rubric out, or name a file"
            wrong(made.document, made.origins["rubric"], said)
            return False
        if isinstance(rubric, str) and names_file(rubric):
            data = self._findings.read(made.document, made.origins["rubric"], rubric)
            if data is None:
                return False
            fields["rubric"] = rubric_text(data.decode("utf-8", "replace"))
            if not fields["rubric"]:
                wrong(made.document, made.origins["rubric"], f"checks nothing: {rubric} is empty")
                return False
        if self._judge is not None:
            fields.setdefault("model", self._judge)
        if not fields.get("model") and not self._own_judge:
            said = (
                "needs a model to judge with: add config.judge_model=MODEL to the command, or `judge_model` to `config`"
            )
            wrong(made.document, made.location, said)
            return False
        return True


def only_for(task: str) -> str:
    """The expression that is true for one task's row."""
    return f"id == {json.dumps(task, ensure_ascii=False)}"


def unique_names(graders: Sequence[tuple[str | None, str]]) -> list[str]:
    """Names for graders, given by task (None: of the eval) and name: theirs where unique, else with the task's id.

    In waza results are kept by name, and of two with one name the later replaces the earlier.
    """
    counts = Counter(name for _, name in graders)
    found: list[str] = []
    for task, name in graders:
        shared = name in TAKEN_NAMES or (task is not None and counts[name] > 1)
        chosen = base = f"{task or 'eval'}/{name}" if shared else name
        number = 1
        while chosen in found:
            number += 1
            chosen = f"{base}#{number}"
        found.append(chosen)
    return found


def allow_only(names: list[str]) -> list[str]:
    """Return the patterns that match these tools' names and no others."""
    return [f"^{re.escape(name)}$" for name in names] or ["^$"]


def _plain(path: str) -> str:
    """Return a name for a file's content that leads out of no folder."""
    parts = posixpath.normpath(path).split("/")
    return "/".join(part for part in parts if part not in ("", "..", "~")) or path


def _literals(value: Any) -> Any:
    if isinstance(value, list):
        return [_literals(inner) for inner in value]
    return literal(value) if isinstance(value, str) else value
