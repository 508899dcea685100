"""Translate waza's tasks, from task files, rows of a CSV file and `trigger_tests.yaml`, into samples."""

from __future__ import annotations

import csv
import glob
import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast import Document
from holdfast.plugins.waza.files import instruction_files, is_below, read_repos, task_files
from holdfast.plugins.waza.findings import at
from holdfast.spec.document import read_document

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.plugins.waza.config import Config
    from holdfast.plugins.waza.findings import WazaFindings
    from holdfast.plugins.waza.graders import Graders, TranslatedGrader
    from holdfast.spec.document import Location

_KNOWN: Final = (
    *("id", "name", "description", "tags", "enabled", "golden", "context_dir", "timeout_seconds"),
    *("skill_directories", "instruction_files", "inputs", "expected", "graders", "checkpoints"),
    "command_mocks",
)
_IGNORED: Final = {
    "first_event_timeout_seconds": "is of waza's executor; timeout_seconds holds for each turn",
    "requirements": "is for waza's own reports",
}
_INPUTS: Final = (
    *("prompt", "prompt_file", "context", "files", "repos", "workdir", "environment", "follow_up_prompts"),
    "responder",
)
_EXPECTED: Final = ("output_contains", "output_not_contains", "output_contains_any")
_EXPECTED_IGNORED: Final = dict.fromkeys(
    ("outcomes", "tool_calls", "should_trigger"), "is not graded: waza reads it and checks nothing"
) | {"behavior": "is not graded: in waza too it is no check; use a `behavior` grader"}
_ACTION: Final = re.compile(r"(?:\s*\{\{-\s|\{\{)(.*?)(?:\s-\}\}\s*|\}\})", re.DOTALL)
_VARIABLE: Final = re.compile(r"\.Vars\.(\w+)|index\s+\.Vars\s+\"([^\"]*)\"")

_PER_TRIAL: Final = ("JobID", "Iteration", "Attempt", "Timestamp")
"""variables that differ between trials in waza: a text with one of them has no fixed content"""
SHOULD: Final = "trigger_accuracy/should_trigger"
SHOULD_NOT: Final = "trigger_accuracy/should_not_trigger"

_TRIGGER_LISTS: Final = {"should_trigger_prompts": True, "should_not_trigger_prompts": False}


@dataclass
class WazaCheckpoint:
    """Graders of a task after a turn."""

    location: Location
    after_turn: int
    on_failure: str
    graders: list[TranslatedGrader]


@dataclass
class WazaTask:
    """One task with all that belongs to it."""

    document: Document
    id: str
    row: dict[str, Any]
    graders: list[TranslatedGrader] = field(default_factory=list)
    checkpoints: list[WazaCheckpoint] = field(default_factory=list)
    turns: int = 1
    """maximum number of turns"""
    timeout: float | None = None
    instructions: list[str] = field(default_factory=list)
    """texts of `instruction_files`, the eval's first"""
    responder_model: str | None = None
    checkout: dict[str, Any] = field(default_factory=dict)
    """files of `inputs.repos`"""
    workdir: str = ""
    environment: dict[str, str] = field(default_factory=dict)


class Tasks:
    """Reads the tasks of an eval."""

    def __init__(
        self, findings: WazaFindings, document: Document, folder: Path, config: Config, graders: Graders
    ) -> None:
        self._findings = findings
        self._document = document
        self._folder = folder
        self._config = config
        self._graders = graders
        inputs = findings.block(document, (), "inputs")
        self._variables = {key: _to_text(value) for key, value in inputs.items()}

    def read(self) -> list[WazaTask]:
        """Read all tasks in waza's order: by pattern, then by name."""
        wrong, data = self._findings.wrong, self._document.data
        if data.get("tasks") and data.get("tasks_from"):
            wrong(self._document, ("tasks_from",), "give either `tasks` or `tasks_from`, not both")
        tasks = list(self._from_csv() if data.get("tasks_from") else self._from_files())
        if not tasks and not self._findings.problems:
            wrong(self._document, ("tasks",), "there is no task to run")
        documents: dict[str, Document] = {}
        for task in tasks:
            if task.id in documents:
                message = f"task id {task.id!r} is already used in {documents[task.id].path}; ids name results"
                wrong(task.document, ("id",), message)
            documents[task.id] = task.document
        return tasks

    def _from_files(self) -> Iterator[WazaTask]:
        visited: set[Path] = set()
        disabled: list[str] = []
        for number, pattern in enumerate(self._findings.texts(self._document, ("tasks",))):
            for path in self._matching(number, pattern):
                if path in visited:
                    message = f"{path} is matched a second time; it is run once"
                    self._findings.notice(self._document, ("tasks", number), message)
                    continue
                visited.add(path)
                document = read_document(path)
                if document.data.get("enabled") is False:
                    disabled.append(path.name)
                elif (task := self._task(document, self._variables)) is not None:
                    yield task
        if disabled:
            self._findings.notice(self._document, ("tasks",), f"not run, since `enabled: false`: {', '.join(disabled)}")

    def _matching(self, number: int, pattern: str) -> list[Path]:
        """Return the task files of a pattern, which is relative to the eval file; a plain name is looked up."""
        place = ("tasks", number)
        near = self._document.path.parent if self._document.path else self._folder
        names = sorted(glob.glob(pattern.replace("**", "*"), root_dir=near, include_hidden=True))
        if names:
            paths = [self._findings.inside(self._document, place, near, name) for name in names]
            return [path for path in paths if path is not None and path.is_file()]
        if glob.escape(pattern) != pattern:
            self._findings.notice(self._document, place, f"no file matches {pattern}")
        elif (path := self._findings.find(pattern)) is not None:
            return [path]
        else:
            self._findings.wrong(self._document, place, self._findings.nowhere(pattern))
        return []

    def _from_csv(self) -> Iterator[WazaTask]:
        name = str(self._document.data["tasks_from"])
        near = self._document.path.parent if self._document.path else self._folder
        if (near / name).exists():
            path = self._findings.inside(self._document, ("tasks_from",), near, name)
        elif (path := self._findings.find(name)) is None:
            self._findings.wrong(self._document, ("tasks_from",), self._findings.nowhere(name))
        if path is None:
            return
        first, last = self._range()
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = csv.DictReader(file)
                for number, row in enumerate(rows, 1):
                    if first <= number <= last:
                        values = {str(key): value or "" for key, value in row.items() if key is not None}
                        document = Document(_from_row(values, number), Path(f"{path}:{rows.line_num}"))
                        task = self._task(document, {**self._variables, **values})
                        if task is not None:
                            yield task
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            self._findings.wrong(self._document, ("tasks_from",), f"{name} cannot be read: {error}")

    def _range(self) -> tuple[int, float]:
        bounds = self._document.data.get("range")
        if bounds is None:
            return 1, float("inf")
        if isinstance(bounds, list) and len(bounds) == 2 and all(type(end) is int for end in bounds):
            return bounds[0], bounds[1]
        self._findings.wrong(self._document, ("range",), "must be [first, last], counted from 1, both included")
        return 1, float("inf")

    def _task(self, document: Document, variables: Mapping[str, str]) -> WazaTask | None:
        findings = self._findings
        findings.keys(document, (), _KNOWN, ignored=_IGNORED)
        inputs = findings.block(document, (), "inputs")
        findings.keys(document, ("inputs",), _INPUTS)
        findings.block(document, (), "expected")
        findings.keys(document, ("expected",), _EXPECTED, ignored=_EXPECTED_IGNORED)
        task_id = document.data.get("id")
        if task_id in (None, ""):
            findings.wrong(document, ("id",), "a task needs an id, which names its results")
            return None
        name = _to_text(document.data.get("name") or task_id)
        task = WazaTask(document, _to_text(task_id), {"id": _to_text(task_id), "name": name})
        prompt = self._prompt(task, variables)
        follow_ups = self._follow_ups(task, variables)
        if prompt is None:
            return None
        context = findings.block(document, ("inputs",), "context")
        fixtures = self._fixtures(document)
        instructions = instruction_files(findings, self._document, ("config", "instruction_files"), fixtures)
        instructions |= instruction_files(findings, document, ("instruction_files",), fixtures)
        task.instructions = [text.decode().strip() for text in instructions.values()]
        task.row |= {
            **({"description": str(document.data["description"])} if document.data.get("description") else {}),
            "prompt": prompt,
            "follow_ups": follow_ups,
            "files": task_files(findings, document, self._folder, fixtures, instructions),
            **({"tags": tags} if (tags := findings.texts(document, ("tags",))) else {}),
            **({"golden": True} if document.data.get("golden") is True else {}),
            **({"context": context} if context else {}),
            **({"group": group} if (group := self._group(context, tags)) else {}),
        }
        task.checkout = read_repos(findings, document)
        task.workdir = self._workdir(task, inputs.get("workdir"))
        environment = findings.block(document, ("inputs",), "environment")
        task.environment = {str(key): _to_text(value) for key, value in environment.items()}
        task.turns = 1 + len(follow_ups)
        if inputs.get("responder") is not None:
            self._responder(task, variables)
        timeout = document.data.get("timeout_seconds")
        if timeout is not None and findings.is_number(timeout, document, ("timeout_seconds",), 1):
            task.timeout = timeout
        task.graders = [
            *self._graders.translate_expected(document),
            *self._graders.translate_all(document, ("graders",)),
        ]
        task.checkpoints = list(self._checkpoints(task))
        return task

    def _workdir(self, task: WazaTask, name: Any) -> str:
        """Return the folder of the workspace that the target starts in; empty for the workspace itself."""
        if name in (None, "", "."):
            return ""
        if not isinstance(name, str) or not is_below(name):
            self._findings.wrong(task.document, ("inputs", "workdir"), "names a folder of the workspace, without `..`")
            return ""
        folder = posixpath.normpath(name)
        if not any(path.startswith(f"{folder}/") for path in (*task.row["files"], *task.checkout)):
            message = f"there is no folder {name!r} among the task's files and repositories"
            self._findings.wrong(task.document, ("inputs", "workdir"), message)
        return folder

    def _prompt(self, task: WazaTask, variables: Mapping[str, str]) -> str | None:
        findings, document, inputs = self._findings, task.document, at(task.document, ("inputs",))
        prompt, file = inputs.get("prompt"), inputs.get("prompt_file")
        if prompt and file:
            findings.wrong(document, ("inputs", "prompt_file"), "give either prompt or prompt_file, not both")
        place: Location = ("inputs", "prompt")
        if file and not prompt:
            place = ("inputs", "prompt_file")
            near = document.path.parent if document.path else self._folder
            if Path(str(file)).is_absolute() or ".." in Path(str(file)).parts:
                findings.wrong(document, place, "must be a path below the task file's folder")
                return None
            try:
                prompt = (near / str(file)).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                findings.wrong(document, place, f"{file} cannot be read: {error}")
                return None
        if prompt is None and "prompt" in inputs:
            prompt = ""  # `prompt:` without a value
        elif isinstance(prompt, int | float):
            prompt = _to_text(prompt)
        if not isinstance(prompt, str):
            message = (
                "a task needs inputs.prompt, a text that may be empty, or inputs.prompt_file; "
                "a row of a table, its column prompt"
            )
            findings.wrong(document, place, message)
            return None
        return self._render(task, place, prompt, variables)

    def _render(self, task: WazaTask, place: Location, text: str, variables: Mapping[str, str]) -> str:
        try:
            return render(text, variables, task.id, str(task.row["name"]))
        except ValueError as error:
            self._findings.wrong(task.document, place, str(error))
            return text

    def _follow_ups(self, task: WazaTask, variables: Mapping[str, str]) -> list[str]:
        place = ("inputs", "follow_up_prompts")
        texts = self._findings.texts(task.document, place)
        return [self._render(task, (*place, number), text, variables) for number, text in enumerate(texts)]

    def _responder(self, task: WazaTask, variables: Mapping[str, str]) -> None:
        place: Location = ("inputs", "responder")
        findings, document, block = self._findings, task.document, at(task.document, ("inputs", "responder"))
        findings.keys(document, place, ("model", "instructions", "max_followups"))
        maximum, text = block.get("max_followups"), block.get("instructions")
        if task.row["follow_ups"]:
            findings.wrong(document, place, "give either follow_up_prompts or a responder, not both")
        if not findings.is_number(maximum, document, (*place, "max_followups"), 1):
            return
        if not isinstance(text, str) or not text.strip():
            findings.wrong(document, (*place, "instructions"), "must say who the user is and what the user wants")
            return
        text = self._render(task, (*place, "instructions"), text, variables)
        task.row |= {"instructions": text, "max_followups": maximum}
        task.turns = 1 + maximum
        task.responder_model = block.get("model")

    def _checkpoints(self, task: WazaTask) -> Iterator[WazaCheckpoint]:
        wrong = self._findings.wrong
        turns: set[int] = set()
        for place, block in self._findings.blocks(task.document, ("checkpoints",), "checkpoints"):
            self._findings.keys(task.document, place, ("after_turn", "graders", "on_failure"))
            turn, on_failure = block.get("after_turn"), block.get("on_failure") or "continue"
            graders = self._graders.translate_all(task.document, (*place, "graders"))
            if not self._findings.is_number(turn, task.document, (*place, "after_turn"), 1):
                continue
            if on_failure not in ("continue", "stop"):
                wrong(task.document, (*place, "on_failure"), f"must be continue or stop, not {on_failure!r}")
            if turn in turns:
                wrong(task.document, (*place, "after_turn"), f"duplicate checkpoint after turn {turn}")
            if turn > task.turns and "max_followups" not in task.row:
                message = f"{turn} is never reached: the task has at most {task.turns} turns"
                wrong(task.document, (*place, "after_turn"), message)
            if not block.get("graders"):
                wrong(task.document, (*place, "graders"), "a checkpoint needs graders")
            turns.add(turn)
            yield WazaCheckpoint(place, turn, on_failure, graders)

    def _fixtures(self, document: Document) -> Path:
        """Return the folder that paths of fixtures are relative to."""
        name = document.data.get("context_dir")
        folder = self._findings.find(str(name)) if name else None
        if folder is not None and folder.is_dir():
            return folder
        return self._findings.inside(document, ("context_dir",), self._folder, str(name or "fixtures")) or self._folder

    def _group(self, context: dict[str, Any], tags: list[str]) -> str | None:
        """Return the group of a task: the key of its context, or a tag such as `language:go`."""
        key = self._config.group_by
        if key is None:
            return None
        if context.get(key) is not None:
            return _to_text(context[key])
        return next((tag[len(key) + 1 :] for tag in tags if tag.startswith((f"{key}:", f"{key}="))), None)


def _from_row(values: Mapping[str, str], number: int) -> dict[str, Any]:
    """Convert a row of a CSV file to the content of a task file."""
    return {
        "id": values.get("id") or values.get("name") or f"row-{number}",
        "name": values.get("name") or values.get("id") or f"row-{number}",
        "inputs": {"prompt": values.get("prompt")},
    }


def _to_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def render(text: str, variables: Mapping[str, str], task_id: str, task_name: str) -> str:
    """Fill in the variables of a text; raise ValueError for missing ones, and for anything but plain variables."""
    builtins = {".TaskID": task_id, ".TaskName": task_name}

    def value(match: re.Match[str]) -> str:
        action = match[1].strip()
        if variable := _VARIABLE.fullmatch(action):
            name = variable[1] or variable[2]
            if name in variables:
                return variables[name]
            available = f"; inputs have: {', '.join(sorted(variables))}" if variables else "; the eval has no inputs"
            raise ValueError(f"there is no variable {name!r}{available}")
        if action in builtins:
            return builtins[action]
        if literal := re.fullmatch(r'"((?:[^"\\])*)"|`([^`]*)`', action):
            return literal[1] or literal[2] or ""
        if action.startswith("/*"):
            return ""
        if action.removeprefix(".") in _PER_TRIAL:
            raise ValueError(f"{{{{{action}}}}} differs from trial to trial and cannot be part of a prompt")
        raise ValueError(
            f"{{{{{action}}}}} is more of Go's templates than is read here: {{{{.Vars.name}}}}, {{{{.TaskID}}}}, "
            '{{.TaskName}}; two braces as such are written {{"{{"}}'
        )

    return _ACTION.sub(value, text)


def trigger_rows(
    findings: WazaFindings, path: Path, *, measurable: bool
) -> tuple[Document, list[dict[str, Any]]] | None:
    """Return the prompts as samples; None if there are none, or if the target cannot use a skill."""
    if not path.is_file():
        return None
    document = read_document(path)
    findings.keys(document, (), ("skill", *_TRIGGER_LISTS))
    rows = list(_trigger_rows(findings, document))
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


def _trigger_rows(findings: WazaFindings, document: Document) -> Iterator[dict[str, Any]]:
    number = 0
    for key, should_trigger in _TRIGGER_LISTS.items():
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
