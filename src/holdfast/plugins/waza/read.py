"""Translate a waza eval as a whole into an equivalent eval file of Holdfast.

The run's manifest stores that document, so resuming, grading and comparing need only the run's directory. The origin
of each part is stored with it, so that a problem is reported with its task file and line.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from holdfast import Document, Format, UsageError
from holdfast.plugins.waza.config import project_folder, read_config, version_problem
from holdfast.plugins.waza.files import agent_file, skill_text
from holdfast.plugins.waza.findings import WazaFindings
from holdfast.plugins.waza.graders import Graders, TranslatedGrader, allow_only, unique_names, where_task
from holdfast.plugins.waza.target import target_fields
from holdfast.plugins.waza.tasks import SHOULD, SHOULD_NOT, Tasks, WazaTask, trigger_graders, trigger_rows
from holdfast.spec.eval_schema import Selection
from holdfast.spec.load import apply_override, limit_of
from holdfast.spec.schema import SCHEMA_VERSION
from holdfast.spec.target_schema import TARGETS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from holdfast import Override
    from holdfast.plugins.waza.config import Config
    from holdfast.spec.document import Location

_KNOWN: Final = (
    *("schemaVersion", "scenario", "name", "description", "version", "skill", "inputs", "tasks"),
    *("tasks_from", "range", "config", "hooks", "metrics", "graders", "baseline", "mcp_mocks"),
    "command_mocks",
)
_IGNORED: Final = {
    "adversarial": "is read by `waza adversarial` only",
    "baseline": "is not run as well: run the eval without its skill (config.inject_skill_body=false) and use "
    "`holdfast compare`",
}
_ONLY_WAZA: Final = ("skill", "tasks", "tasks_from")
"""keys that only waza's eval files have"""


class Waza(Format):
    """Eval files of waza, which have versions of their own."""

    def recognizes(self, data: Mapping[str, Any]) -> bool:
        config = data.get("config")
        return not data.keys().isdisjoint(_ONLY_WAZA) or (isinstance(config, dict) and "executor" in config)

    def translate(self, document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]]:
        return translate(document, overrides)


def translate(document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]]:
    """Return the eval as a document of Holdfast, and the overrides that are still to be applied.

    `config.…` and `inputs.…` change waza's file. Rows are selected here, so that graders of other tasks are left out.
    """
    source = replace(document, data=copy.deepcopy(document.data))
    remaining: list[Override] = []
    selection: dict[str, Any] = {}
    for key, value in overrides:
        if key[0] in ("config", "inputs"):
            apply_override(source.data, key, value)
        elif key in (("dataset", "ids"), ("dataset", "tags"), ("dataset", "limit")):
            selection[key[1]] = value
        else:
            remaining.append((key, value))
    translation = _Translation(source, _target_kind(overrides), selection)
    translated = translation.document()
    target_keys: set[str] = set()
    for key, value in remaining:
        if key[0] == "target":
            target_keys.update(key[1:2] or (value if isinstance(value, dict) else ()))
    remaining += [(("target", name), value) for name, value in translation.target.items() if name not in target_keys]
    return translated, remaining


def _target_kind(overrides: Sequence[Override]) -> str | None:
    """Return the kind of target that the command line sets."""
    for key, value in overrides:
        if key[0] == "target":
            kinds = value if len(key) == 1 and isinstance(value, dict) else key[1:2]
            if kind := next((kind for kind in TARGETS if kind in kinds), None):
                return kind
    return None


class _Translation:
    """Translates one eval."""

    def __init__(self, document: Document, kind: str | None, selection: dict[str, Any]) -> None:
        assert document.path is not None
        self._document = document
        self._folder = document.path.resolve().parent
        self._kind = kind
        self._selection = selection
        self._findings = WazaFindings(project_folder(self._folder), self._folder)
        self._origins: dict[Location, tuple[Document, Location]] = {}
        self._samples: list[dict[str, Any]] = []
        self.target: dict[str, Any] = {}
        """fields that the eval sets for any target"""

    def document(self) -> Document:
        """Return the translated document; raise ConfigError with all problems of all files."""
        findings, source = self._findings, self._document
        self._check_version()
        findings.keys(source, (), _KNOWN, ignored=_IGNORED)
        if not source.data.get("name"):
            findings.wrong(source, ("name",), "is missing")
        config = read_config(findings, source)
        target = self._target(config)
        kind = self._kind or next(iter(target), "")
        translator = Graders(findings, self._folder, config.judge, own_judge=kind in ("model", ""))
        common = translator.translate_all(source, ("graders",))
        common += self._tool_policy(config, common)
        tasks = self._select(Tasks(findings, source, self._folder, config, translator).read())
        self.target = target_fields(findings, source, tasks, kind)
        findings.raise_problems()
        self._add_rows(tasks)
        graders, triggers = self._graders(common, tasks), self._triggers(kind)
        data: dict[str, Any] = {
            "schemaVersion": SCHEMA_VERSION,
            "name": str(source.data["name"]),
            "metadata": {"waza": self._metadata(config)},
            "target": target,
            **self._conversation(tasks, config, kind),
            "workspace": {"files": self._workspace_files(tasks)},
            "trials": config.trials,
            "graders": [*graders, *triggers],
            "checkpoints": self._checkpoints(tasks),
            "limits": self._limits(config, tasks),
            "gate": self._gate(bool(triggers)),
            "hooks": translate_hooks(findings, source, self._folder),
            "samples": self._samples,
        }
        self._complete_rows()
        if triggers:
            for grader in graders[: len(common)]:
                grader["where"] = "should_trigger is not defined"
        findings.raise_problems()
        self._notice_ungraded(common, tasks)
        origins: dict[Location, tuple[Document, Location]] = {
            ("name",): (source, ("name",)),
            ("hooks",): (source, ("hooks",)),
            **self._origins,
        }
        return Document(data, source.path, elsewhere=origins, notices=findings.notices)

    def _check_version(self) -> None:
        data = self._document.data
        if (problem := version_problem(data)) is not None:
            place: Location = ("schemaVersion",) if "schemaVersion" in data else ("scenario",)
            self._findings.wrong(self._document, place, problem)
        if data.get("scenario"):
            self._findings.strict = self._document.path

    def _workspace_files(self, tasks: list[WazaTask]) -> str:
        """Return the expression for a row's files; the mock executor does not list repositories' files."""
        if not any(task.checkout for task in tasks):
            return "files"
        for task in tasks:
            task.row["checkout"] = task.checkout
        return "dict(files, **checkout)"

    def _complete_rows(self) -> None:
        """Give every row the fields that some rows have and templates name."""
        for key, empty in (("workdir", ""), ("environment", {}), ("checkout", {})):
            if any(key in row for row in self._samples):
                for row in self._samples:
                    row.setdefault(key, empty)

    def _target(self, config: Config) -> dict[str, Any]:
        if self._kind is not None:
            return {}
        if config.executor == "mock":
            return {"mock": "waza"}
        where = self._document.path
        message = (
            f"the executor {config.executor!r} is waza's own. Say what to measure: "
            f"`holdfast eval {where} -m {config.model or 'gpt-4o-mini'}` for a model, or "
            f"`holdfast eval {where} 'target.command=[./agent, \"{{{{ prompt }}}}\"]'` for an agent"
        )
        place: Location = (
            ("config", "executor") if "executor" in (self._document.data.get("config") or {}) else ("config",)
        )
        self._findings.wrong(self._document, place, message)
        return {}

    def _select(self, tasks: list[WazaTask]) -> list[WazaTask]:
        """Return the tasks that the command line selects."""
        selection = Selection.of(**{key: self._selection[key] for key in ("ids", "tags") if key in self._selection})
        selected = [task for task in tasks if selection.takes(task.row, task.id)]
        if tasks and not selected:
            patterns = " ".join(repr(glob) for glob in (*selection.ids, *selection.tags))
            raise UsageError(f"no task matches {patterns}", remedy=f"Tasks: {', '.join(task.id for task in tasks)}.")
        return selected[: limit_of(self._selection["limit"])] if "limit" in self._selection else selected

    def _add_rows(self, tasks: list[WazaTask]) -> None:
        for number, task in enumerate(tasks):
            self._samples.append(task.row)
            self._origins[("samples", number)] = (task.document, ())

    def _graders(self, common: list[TranslatedGrader], tasks: list[WazaTask]) -> list[dict[str, Any]]:
        """Return the graders of the final output: the eval's for all rows, each task's for its own row."""
        graders: list[tuple[str | None, TranslatedGrader]] = [(None, grader) for grader in common]
        graders += [(task.id, grader) for task in tasks for grader in task.graders]
        names = unique_names([(task, grader.name) for task, grader in graders])
        return [
            self._place(("graders", number), grader, name, task)
            for number, ((task, grader), name) in enumerate(zip(graders, names, strict=True))
        ]

    def _place(self, place: Location, grader: TranslatedGrader, name: str, task: str | None) -> dict[str, Any]:
        self._origins[place] = (grader.document, grader.location)
        for key, origin in grader.origins.items():
            self._origins[(*place, key)] = (grader.document, origin)
        where = {} if task is None else {"where": where_task(task)}
        return {**grader.fields, "name": name, **where}

    def _checkpoints(self, tasks: list[WazaTask]) -> list[dict[str, Any]]:
        checkpoints = [(task, checkpoint) for task in tasks for checkpoint in task.checkpoints]
        names: dict[int, list[str]] = {}
        for turn in {checkpoint.after_turn for _, checkpoint in checkpoints}:
            graders = [
                (task.id, grader.name)
                for task, point in checkpoints
                if point.after_turn == turn
                for grader in point.graders
            ]
            names[turn] = unique_names(graders)
        blocks = []
        for number, (task, checkpoint) in enumerate(checkpoints):
            place: Location = ("checkpoints", number)
            self._origins[place] = (task.document, checkpoint.location)
            grader_names = [names[checkpoint.after_turn].pop(0) for _ in checkpoint.graders]
            blocks.append(
                {
                    "after_turn": checkpoint.after_turn,
                    "on_failure": checkpoint.on_failure,
                    "where": where_task(task.id),
                    "graders": [
                        self._place((*place, "graders", inner), grader, name, None)
                        for inner, (grader, name) in enumerate(zip(checkpoint.graders, grader_names, strict=True))
                    ],
                }
            )
        return blocks

    def _conversation(self, tasks: list[WazaTask], config: Config, kind: str) -> dict[str, Any]:
        conversation: dict[str, Any] = {"prompt": "{{ prompt }}", "follow_ups": "follow_ups", "same_prompt": True}
        if kind == "model":
            self._put_before(tasks, config)
            if any("system" in row for row in self._samples):
                conversation["system"] = "{{ system }}"
                for row in self._samples:
                    row.setdefault("system", "")
        simulated = [task for task in tasks if "max_followups" in task.row]
        if simulated:
            models = {task.responder_model for task in simulated}
            if len(models) > 1:
                reason = "responders of one eval are played by one model"
                self._findings.wrong(simulated[0].document, ("inputs", "responder"), f"not supported: {reason}")
            for row in self._samples:
                row.setdefault("instructions", "")
                row.setdefault("max_followups", 0)
            conversation["responder"] = {"instructions": "{{ instructions }}", "max_followups": "max_followups"}
            model = next(iter(models)) or (config.model if kind != "model" else None)  # as in waza
            if model is not None:
                conversation["responder"]["model"] = model
            self._origins["responder",] = (simulated[0].document, ("inputs", "responder"))
        return conversation

    def _tool_policy(self, config: Config, common: list[TranslatedGrader]) -> list[TranslatedGrader]:
        """Return a check that only the tools of the `.agent.md` are called, unless the eval has its own."""
        place: Location = ("config", "skill_directories")
        agent = agent_file(self._skill_folders(config.skills))
        if (
            agent is None
            or agent.tools is None
            or any(grader.fields.get("type") == "tool_constraint" for grader in common)
        ):
            return []
        message = (
            f"{agent.path} allows these tools only: {', '.join(agent.tools) or 'none'} (grader agent_tools_implicit)"
        )
        self._findings.notice(self._document, place, message)
        fields = {"type": "tool_constraint", "name": "agent_tools_implicit", "allow_only": allow_only(agent.tools)}
        return [TranslatedGrader(fields, self._document, place, {})]

    def _put_before(self, tasks: list[WazaTask], config: Config) -> None:
        """Put the skill's text before the conversation, since a model has no skills. The key depends on the text."""
        findings, source = self._findings, self._document
        skill = str(source.data.get("skill") or "")
        for task in tasks:
            folders = findings.texts(task.document, ("skill_directories",))
            # In a scenario, an empty list of a task means that it has no skills.
            own = bool(folders) or (bool(source.data.get("scenario")) and "skill_directories" in task.document.data)
            document = task.document if own else source
            place: Location = ("skill_directories",) if own else ("config", "skill_directories")
            names = folders if own else config.skills
            places = self._skill_folders(names)
            for name in names:
                if findings.find(name) is None:
                    findings.notice(document, place, findings.nowhere(name))
            skill_file = skill_text(places, skill) if skill and config.injects else None
            if skill_file is None and config.injects and (agent := agent_file(places)) is not None:
                skill_file = agent.path, agent.body
            if skill_file is not None:
                findings.notice(
                    source, ("skill",), f"the text of {skill_file[0]} stands before the conversation, as `system`"
                )
            for needed in config.required_skills:
                if skill_text(places, needed) is None:
                    findings.wrong(source, ("config", "required_skills"), f"there is no SKILL.md of {needed!r}")
            parts = [*([skill_file[1]] if skill_file else []), *task.instructions]
            if parts:
                task.row["system"] = "\n\n".join(parts)

    def _skill_folders(self, names: Sequence[str]) -> list[Path]:
        folders = (self._findings.find(name) for name in names)
        return [folder for folder in folders if folder is not None]

    def _triggers(self, kind: str) -> list[dict[str, Any]]:
        if self._selection:
            return []  # tasks were selected
        assert self._document.path is not None
        path = self._document.path.parent / "trigger_tests.yaml"
        triggers = trigger_rows(self._findings, path, measurable=kind in ("python", "http", "command"))
        if triggers is None:
            return []
        document, rows = triggers
        skill = str(document.data.get("skill") or self._document.data.get("skill") or "")
        if not skill:
            self._findings.notice(document, (), f"{len(rows)} prompts are left out: no skill is named")
            return []
        for row in rows:
            self._origins[("samples", len(self._samples))] = (document, ())
            self._samples.append(row)
        return trigger_graders(skill)

    def _gate(self, triggers: bool) -> dict[str, float]:
        """Return the gate. Of waza's metrics only trigger_accuracy is ever measured."""
        listed = self._document.data.get("metrics") or []
        gate: dict[str, float] = {}
        unmeasured = []
        for metric in listed if isinstance(listed, list) else []:
            name = str(metric.get("name")) if isinstance(metric, dict) else str(metric)
            if name == "trigger_accuracy":
                minimum = metric.get("threshold") if isinstance(metric, dict) else None
                if not triggers:
                    self._findings.notice(self._document, ("metrics",), "trigger_accuracy is not measured in this run")
                elif isinstance(minimum, int | float):
                    gate = {SHOULD: float(minimum), SHOULD_NOT: float(minimum)}
            else:
                unmeasured.append(name)
        if unmeasured:
            message = f"not measured (nor by waza): {', '.join(unmeasured)}"
            self._findings.notice(self._document, ("metrics",), message)
        return gate

    def _limits(self, config: Config, tasks: list[WazaTask]) -> dict[str, Any]:
        limits: dict[str, Any] = {}
        timeouts = [task.timeout for task in tasks if task.timeout is not None]
        seconds = max([*timeouts, *([config.turn_timeout] if config.turn_timeout else [])], default=None)
        if timeouts and len({*timeouts, config.turn_timeout}) > 1:
            first = next(task for task in tasks if task.timeout is not None)
            message = f"one time-out holds for all tasks, the longest: {seconds:g} s for each turn"
            self._findings.notice(first.document, ("timeout_seconds",), message)
        if seconds is not None:
            longest = max(task.turns for task in tasks)
            limits |= {"turn_timeout": seconds, "trial_timeout": max(600, 2 * seconds * longest)}
        if config.concurrency is not None:
            limits["concurrency"] = config.concurrency
        return limits

    def _metadata(self, config: Config) -> dict[str, Any]:
        """Return the metadata that `--export waza` repeats."""
        data = self._document.data
        texts = {key: str(data[key]) for key in ("skill", "scenario", "version", "description") if data.get(key)}
        values = {
            "executor": config.executor,
            "model": config.model,
            "judge_model": config.judge,
            "group_by": config.group_by,
        }
        return {**texts, **{key: value for key, value in values.items() if value}}

    def _notice_ungraded(self, common: list[TranslatedGrader], tasks: list[WazaTask]) -> None:
        for task in tasks:
            if not common and not task.graders and not task.checkpoints:
                message = "has no graders: it is run and not graded, while waza would pass it"
                self._findings.notice(task.document, (), message)


def translate_hooks(findings: WazaFindings, document: Document, folder: Path) -> dict[str, Any]:
    """Return the hooks of an eval.

    A hook without a working directory runs in the folder relative to which its program is named, or else in the eval's
    folder.
    """
    hooks: dict[str, Any] = copy.deepcopy(findings.block(document, (), "hooks"))
    for when, listed in hooks.items():
        for number, hook in enumerate(listed if isinstance(listed, list) else []):
            place = _hook_folder(findings, document, ("hooks", when, number), hook) if isinstance(hook, dict) else None
            if place is not None:
                hook["working_directory"] = os.path.relpath(place.resolve(), folder)
    return hooks


def _hook_folder(findings: WazaFindings, document: Document, location: Location, hook: dict[str, Any]) -> Path | None:
    name = hook.get("working_directory")
    if isinstance(name, str) and name:
        place = findings.find(name)
        if place is None:
            findings.notice(document, (*location, "working_directory"), findings.nowhere(name))
        return place
    command = hook.get("command")
    words = command.split() if isinstance(command, str) else command
    program = str(words[0]) if isinstance(words, list) and words else ""
    if "/" not in program or program.startswith("/"):
        return None
    return next((place for place in findings.places if (place / program).is_file()), None)
