"""A waza eval as a whole, turned into the document that our own eval file would give.

The document is what the run's manifest keeps, so a run goes on, is graded and compared from its directory alone. Where
each part of it came from is kept beside it: a problem is named by the task file and line in which it stands.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ConfigError, UsageError
from holdfast.formats.waza.config import project_folder, read_config, version_problem
from holdfast.formats.waza.files import agent_file, instructions, skill_text
from holdfast.formats.waza.findings import Findings
from holdfast.formats.waza.graders import Graders, Made, allow_only, only_for, unique_names
from holdfast.formats.waza.hooks import placed_hooks
from holdfast.formats.waza.target import target_fields
from holdfast.formats.waza.tasks import Task, Tasks
from holdfast.formats.waza.triggers import SHOULD, SHOULD_NOT, trigger_graders, trigger_rows
from holdfast.spec.document import Document
from holdfast.spec.load import limit_of
from holdfast.spec.load_targets import TARGETS
from holdfast.spec.overrides import apply_override
from holdfast.spec.schema import SCHEMA_VERSION
from holdfast.spec.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from holdfast.formats.waza.config import Config
    from holdfast.spec.document import Location
    from holdfast.spec.overrides import Override

_KNOWN: Final = (
    "schemaVersion",
    "scenario",
    "name",
    "description",
    "version",
    "skill",
    "inputs",
    "tasks",
    "tasks_from",
    "range",
    "config",
    "hooks",
    "metrics",
    "graders",
    "baseline",
    "mcp_mocks",
    "command_mocks",
)
_IGNORED: Final = {
    "adversarial": "is read by `waza adversarial` only",
    "baseline": "is not run beside: run the eval without its skill (config.inject_skill_body=false) and use "
    "`holdfast compare`",
}


def translate(document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]]:
    """The eval as a document of ours, and the overrides that are still to be laid over it.

    `config.…` and `inputs.…` change waza's file; the rows are chosen here, so that graders of other tasks stay away.
    """
    theirs = replace(document, data=copy.deepcopy(document.data))
    left: list[Override] = []
    chosen: dict[str, Any] = {}
    for key, value in overrides:
        if key[0] in ("config", "inputs"):
            apply_override(theirs.data, key, value)
        elif key in (("dataset", "ids"), ("dataset", "tags"), ("dataset", "limit")):
            chosen[key[1]] = value
        else:
            left.append((key, value))
    translation = _Translation(theirs, _target_kind(overrides), chosen)
    ours = translation.document()
    given: set[str] = set()
    for key, value in left:
        if key[0] == "target":
            given.update(key[1:2] or (value if isinstance(value, dict) else ()))
    left += [(("target", name), value) for name, value in translation.target.items() if name not in given]
    return ours, left


def _target_kind(overrides: Sequence[Override]) -> str | None:
    """The kind of target that the command line gives."""
    for key, value in overrides:
        if key[0] == "target":
            kinds = value if len(key) == 1 and isinstance(value, dict) else key[1:2]
            if kind := next((kind for kind in TARGETS if kind in kinds), None):
                return kind
    return None


class _Translation:
    """One eval on its way."""

    def __init__(self, document: Document, kind: str | None, chosen: dict[str, Any]) -> None:
        assert document.path is not None
        self._document = document
        self._folder = document.path.resolve().parent
        self._kind = kind
        self._chosen = chosen
        self._findings = Findings(project_folder(self._folder), self._folder)
        self._origins: dict[Location, tuple[Document, Location]] = {}
        self._samples: list[dict[str, Any]] = []
        self.target: dict[str, Any] = {}
        """fields that the eval asks of the target, whichever that is"""

    def document(self) -> Document:
        """Ours; raises ConfigError with everything that is wrong in any of the files."""
        findings, theirs = self._findings, self._document
        self._check_version()
        findings.keys(theirs, (), _KNOWN, ignored=_IGNORED)
        if not theirs.data.get("name"):
            findings.wrong(theirs, ("name",), "is missing")
        config = read_config(findings, theirs)
        target = self._target(config)
        kind = self._kind or next(iter(target), "")
        graders = Graders(findings, self._folder, config.judge, own_judge=kind in ("model", ""))
        common = graders.all_of(theirs, ("graders",))
        common += self._tool_policy(config, common)
        tasks = self._selected(Tasks(findings, theirs, self._folder, config, graders).read())
        self.target = target_fields(findings, theirs, tasks, kind)
        if findings.problems:
            raise ConfigError(findings.problems)
        self._add_rows(tasks)
        made, triggers = self._graders(common, tasks), self._triggers(kind)
        data: dict[str, Any] = {
            "schemaVersion": SCHEMA_VERSION,
            "name": str(theirs.data["name"]),
            "metadata": {"waza": self._metadata(config)},
            "target": target,
            **self._conversation(tasks, config, kind),
            "workspace": {"files": self._workspace_files(tasks)},
            "trials": config.trials,
            "graders": [*made, *triggers],
            "checkpoints": self._checkpoints(tasks),
            "limits": self._limits(config, tasks),
            "gate": self._gate(bool(triggers)),
            "hooks": placed_hooks(findings, theirs, self._folder),
            "samples": self._samples,
        }
        self._complete_rows()
        if triggers:
            for grader in made[: len(common)]:
                grader["where"] = "should_trigger is not defined"
        if findings.problems:
            raise ConfigError(findings.problems)
        self._say_what_is_not_graded(common, tasks)
        origins: dict[Location, tuple[Document, Location]] = {
            ("name",): (theirs, ("name",)),
            ("hooks",): (theirs, ("hooks",)),
            **self._origins,
        }
        return Document(data, theirs.path, elsewhere=origins, notices=findings.notices)

    def _check_version(self) -> None:
        data = self._document.data
        if (problem := version_problem(data)) is not None:
            place: Location = ("schemaVersion",) if "schemaVersion" in data else ("scenario",)
            self._findings.wrong(self._document, place, problem)
        if data.get("scenario"):
            self._findings.strict = self._document.path

    def _workspace_files(self, tasks: list[Task]) -> str:
        """Return the expression for a row's files; those of repositories are apart, as the mock executor shows."""
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
        said = (
            f"the executor {config.executor!r} is waza's own. Say what to measure: "
            f"`holdfast eval {where} -m {config.model or 'gpt-4o-mini'}` for a model, or "
            f"`holdfast eval {where} 'target.command=[./agent, \"{{{{ prompt }}}}\"]'` for an agent"
        )
        place: Location = (
            ("config", "executor") if "executor" in (self._document.data.get("config") or {}) else ("config",)
        )
        self._findings.wrong(self._document, place, said)
        return {}

    def _selected(self, tasks: list[Task]) -> list[Task]:
        """The tasks that the command line asks for."""
        selection = Selection.of(**{key: self._chosen[key] for key in ("ids", "tags") if key in self._chosen})
        left = [task for task in tasks if selection.takes(task.row, task.id)]
        if tasks and not left:
            asked = " ".join(repr(glob) for glob in (*selection.ids, *selection.tags))
            raise UsageError(f"no task matches {asked}", remedy=f"Tasks: {', '.join(task.id for task in tasks)}.")
        return left[: limit_of(self._chosen["limit"])] if "limit" in self._chosen else left

    def _add_rows(self, tasks: list[Task]) -> None:
        for number, task in enumerate(tasks):
            self._samples.append(task.row)
            self._origins[("samples", number)] = (task.document, ())

    def _graders(self, common: list[Made], tasks: list[Task]) -> list[dict[str, Any]]:
        """The graders at the end: the eval's for all rows, each task's for its own."""
        owned: list[tuple[str | None, Made]] = [(None, made) for made in common]
        owned += [(task.id, made) for task in tasks for made in task.graders]
        names = unique_names([(task, made.name) for task, made in owned])
        return [
            self._placed(("graders", number), made, name, task)
            for number, ((task, made), name) in enumerate(zip(owned, names, strict=True))
        ]

    def _placed(self, place: Location, made: Made, name: str, task: str | None) -> dict[str, Any]:
        self._origins[place] = (made.document, made.location)
        for key, origin in made.origins.items():
            self._origins[(*place, key)] = (made.document, origin)
        where = {} if task is None else {"where": only_for(task)}
        return {**made.fields, "name": name, **where}

    def _checkpoints(self, tasks: list[Task]) -> list[dict[str, Any]]:
        found = [(task, checkpoint) for task in tasks for checkpoint in task.checkpoints]
        names: dict[int, list[str]] = {}
        for turn in {checkpoint.after_turn for _, checkpoint in found}:
            here = [(task.id, made.name) for task, one in found if one.after_turn == turn for made in one.graders]
            names[turn] = unique_names(here)
        blocks = []
        for number, (task, checkpoint) in enumerate(found):
            place: Location = ("checkpoints", number)
            self._origins[place] = (task.document, checkpoint.location)
            own = [names[checkpoint.after_turn].pop(0) for _ in checkpoint.graders]
            blocks.append(
                {
                    "after_turn": checkpoint.after_turn,
                    "on_failure": checkpoint.on_failure,
                    "where": only_for(task.id),
                    "graders": [
                        self._placed((*place, "graders", inner), made, name, None)
                        for inner, (made, name) in enumerate(zip(checkpoint.graders, own, strict=True))
                    ],
                }
            )
        return blocks

    def _conversation(self, tasks: list[Task], config: Config, kind: str) -> dict[str, Any]:
        said: dict[str, Any] = {"prompt": "{{ prompt }}", "follow_ups": "follow_ups"}
        if kind == "model":
            self._put_before(tasks, config)
            if any("system" in row for row in self._samples):
                said["system"] = "{{ system }}"
                for row in self._samples:
                    row.setdefault("system", "")
        played = [task for task in tasks if "max_followups" in task.row]
        if played:
            models = {task.responder_model for task in played}
            if len(models) > 1:
                said_of = "responders of one eval are played by one model"
                self._findings.wrong(played[0].document, ("inputs", "responder"), f"not supported: {said_of}")
            for row in self._samples:
                row.setdefault("instructions", "")
                row.setdefault("max_followups", 0)
            said["responder"] = {"instructions": "{{ instructions }}", "max_followups": "max_followups"}
            model = next(iter(models)) or (config.model if kind != "model" else None)  # as in waza
            if model is not None:
                said["responder"]["model"] = model
            self._origins["responder",] = (played[0].document, ("inputs", "responder"))
        return said

    def _tool_policy(self, config: Config, common: list[Made]) -> list[Made]:
        """Return the check that only tools are called which the `.agent.md` declares, unless the eval has its own."""
        place: Location = ("config", "skill_directories")
        agent = agent_file(self._skill_folders(config.skills))
        if agent is None or agent.tools is None or any(made.fields.get("type") == "tool_constraint" for made in common):
            return []
        said = f"{agent.path} allows these tools only: {', '.join(agent.tools) or 'none'} (grader agent_tools_implicit)"
        self._findings.notice(self._document, place, said)
        fields = {"type": "tool_constraint", "name": "agent_tools_implicit", "allow_only": allow_only(agent.tools)}
        return [Made(fields, self._document, place, {})]

    def _put_before(self, tasks: list[Task], config: Config) -> None:
        """A model has no skills: what the skill says is put before the conversation, and so is in the key."""
        findings, theirs = self._findings, self._document
        skill = str(theirs.data.get("skill") or "")
        common = instructions(findings, theirs, ("config", "instruction_files"))
        for task in tasks:
            own = findings.texts(task.document, ("skill_directories",))
            document = task.document if own else theirs
            place: Location = ("skill_directories",) if own else ("config", "skill_directories")
            names = own or config.skills
            places = self._skill_folders(names)
            for name in names:
                if findings.find(name) is None:
                    findings.notice(document, place, findings.nowhere(name))
            found = skill_text(places, skill) if skill and config.injects else None
            if found is None and config.injects and (agent := agent_file(places)) is not None:
                found = agent.path, agent.body
            if found is not None:
                findings.notice(
                    theirs, ("skill",), f"the text of {found[0]} stands before the conversation, as `system`"
                )
            for needed in config.required_skills:
                if skill_text(places, needed) is None:
                    findings.wrong(theirs, ("config", "required_skills"), f"there is no SKILL.md of {needed!r}")
            parts = [*([found[1]] if found else []), *common, *task.instructions]
            if parts:
                task.row["system"] = "\n\n".join(parts)

    def _skill_folders(self, names: Sequence[str]) -> list[Path]:
        found = (self._findings.find(name) for name in names)
        return [folder for folder in found if folder is not None]

    def _triggers(self, kind: str) -> list[dict[str, Any]]:
        if self._chosen:
            return []  # tasks were asked for
        assert self._document.path is not None
        path = self._document.path.parent / "trigger_tests.yaml"
        found = trigger_rows(self._findings, path, measurable=kind in ("python", "http", "command"))
        if found is None:
            return []
        document, rows = found
        skill = str(document.data.get("skill") or self._document.data.get("skill") or "")
        if not skill:
            self._findings.notice(document, (), f"{len(rows)} prompts are left out: no skill is named")
            return []
        for row in rows:
            self._origins[("samples", len(self._samples))] = (document, ())
            self._samples.append(row)
        return trigger_graders(skill)

    def _gate(self, triggers: bool) -> dict[str, float]:
        """Of waza's metrics only trigger_accuracy is ever measured."""
        listed = self._document.data.get("metrics") or []
        gate: dict[str, float] = {}
        unmeasured = []
        for metric in listed if isinstance(listed, list) else []:
            name = str(metric.get("name")) if isinstance(metric, dict) else str(metric)
            if name == "trigger_accuracy":
                least = metric.get("threshold") if isinstance(metric, dict) else None
                if not triggers:
                    self._findings.notice(self._document, ("metrics",), "trigger_accuracy is not measured in this run")
                elif isinstance(least, int | float):
                    gate = {SHOULD: float(least), SHOULD_NOT: float(least)}
            else:
                unmeasured.append(name)
        if unmeasured:
            said = f"waza measures none of these, and they are not here: {', '.join(unmeasured)}"
            self._findings.notice(self._document, ("metrics",), said)
        return gate

    def _limits(self, config: Config, tasks: list[Task]) -> dict[str, Any]:
        limits: dict[str, Any] = {}
        own = [task.timeout for task in tasks if task.timeout is not None]
        seconds = max([*own, *([config.turn_timeout] if config.turn_timeout else [])], default=None)
        if own and len({*own, config.turn_timeout}) > 1:
            first = next(task for task in tasks if task.timeout is not None)
            said = f"one time-out holds for all tasks, the longest: {seconds:g} s for each turn"
            self._findings.notice(first.document, ("timeout_seconds",), said)
        if seconds is not None:
            longest = max(task.turns for task in tasks)
            limits |= {"turn_timeout": seconds, "trial_timeout": max(600, 2 * seconds * longest)}
        if config.concurrency is not None:
            limits["concurrency"] = config.concurrency
        return limits

    def _metadata(self, config: Config) -> dict[str, Any]:
        """Return the fields that `--export waza` copies from the eval."""
        data = self._document.data
        kept = {key: str(data[key]) for key in ("skill", "scenario", "version", "description") if data.get(key)}
        given = {
            "executor": config.executor,
            "model": config.model,
            "judge_model": config.judge,
            "group_by": config.group_by,
        }
        return {**kept, **{key: value for key, value in given.items() if value}}

    def _say_what_is_not_graded(self, common: list[Made], tasks: list[Task]) -> None:
        for task in tasks:
            if not common and not task.graders and not task.checkpoints:
                said = "has no graders: it is run and not graded, while waza would pass it"
                self._findings.notice(task.document, (), said)
