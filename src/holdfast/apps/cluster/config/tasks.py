"""Read `evaluation.tasks`: each is an eval file, of any kind that `holdfast eval` reads, with overrides.

A name is looked up as a file first, then among benchmarks and the tasks that installed packages provide
(`spec.formats`). Benchmarks are compiled here, so that jobs need neither lm-eval nor the data.

Keys of earlier launchers are moved to where they are today. Their `adapter_config` sets up a proxy between harness and
model, which Holdfast does not have: what Holdfast records anyway is accepted, a system prompt, parameters and the
removal of reasoning go into the eval, and anything else that would change answers is noted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from holdfast.apps.cluster.config.launch import Task
from holdfast.apps.cluster.config.schema import NO_TASK_CONTAINER, ApiEndpoint, EvaluatorConfig, Params, TaskBlock
from holdfast.apps.cluster.config.servers import api_root
from holdfast.apps.cluster.config.tree import Tree
from holdfast.apps.cluster.config.variables import EnvVar, add_wandb_server, check_api_keys, read_variables
from holdfast.errors import ConfigError, HoldfastError, UsageError, suggest
from holdfast.spec.document import format_location
from holdfast.spec.formats import find_file, find_format, installed_providers, load_any, read_eval, unknown_task
from holdfast.spec.providers import OPENAI, has_provider
from holdfast.spec.schema import validate_block
from holdfast.spec.target_schema import TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.apps.cluster.config.launch import Container, TaskFile
    from holdfast.spec.document import Document, Location
    from holdfast.spec.eval import Eval
    from holdfast.spec.formats import TaskProvider
    from holdfast.spec.load import Override
    from holdfast.spec.schema import Findings

OLDER = ("config.", "target.api_endpoint.")
"""prefixes of a task's overrides that are meant for nemo_evaluator_config"""
PARAMS = {
    "limit_samples": ("dataset", "limit"),
    "max_new_tokens": ("target", "params", "max_tokens"),
    "temperature": ("target", "params", "temperature"),
    "top_p": ("target", "params", "top_p"),
    "parallelism": ("limits", "concurrency"),
    "request_timeout": ("limits", "turn_timeout"),
    "max_retries": ("limits", "retries"),
}
"""params of a task, and the key of the eval file that each one sets"""
BENCHMARK_PARAMS = {
    "task": ("benchmark", "task"),
    "num_fewshot": ("benchmark", "num_fewshot"),
    "tokenizer": ("target", "tokenizer"),
}
"""`params.task` and values of `params.extra`, and the key of a benchmark that each one sets"""
_APIS = {
    "chat": "chat",
    "vlm": "chat",
    "completions": "completions",
    "completions_logprob": "completions",
    "undefined": None,
}
"""endpoint types, and the `target.api` that each one means"""

Move = tuple[tuple[str, ...], tuple[str, ...]]
MOVED: tuple[Move, ...] = ((("execution", "auto_export", "configs"), ("export",)),)
"""keys of earlier launchers in a configuration, and their names today"""
MOVED_IN_TASKS: tuple[Move, ...] = (
    (("config", "target"), ("target",)),
    (("config", "params", "max_tokens"), ("config", "params", "max_new_tokens")),
)
"""the same for the nemo_evaluator_config of a task"""


@dataclass(frozen=True)
class Endpoint:
    """The measured model, before anything is started."""

    model: str | None = None
    """None: each eval file names its own"""
    default_model: str | None = None
    """for benchmarks, which name no model, if `served_model_name` is not given"""
    base_url: str | None = None
    """None: of the server that is started"""
    api_key_env: str | None = None
    type: str | None = None
    """chat, completions …; a task may ask for another"""
    stream: bool | None = None
    version: str | None = None
    """what the server serves; in the keys of its replies, unless the eval has a `target.version` of its own"""


@dataclass(frozen=True)
class TaskReader:
    """Reads the tasks of a configuration."""

    tree: Tree
    findings: Findings
    shared: TaskFile
    """what all tasks have in common"""
    endpoint: Endpoint
    variables: dict[str, EnvVar]
    """of all tasks"""
    folder: Path
    """the configuration's"""
    container: Container | None
    """how tasks with an image of their own are started, without the image; None: as plain processes"""
    cwd: Path
    providers: Sequence[TaskProvider] | None = None
    """None: of installed packages"""
    overrides: tuple[Override, ...] = ()
    """of every eval file, from the command line: they win over all others"""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    def read(self, selection: Sequence[str]) -> tuple[Task, ...]:
        """Return the selected tasks (all, if none is named), in their order."""
        tasks: list[Task] = []
        for index, number, block in self._select(selection):
            task = self._read_task(index, number, block)
            if task is None:
                continue
            first = next((other for other in tasks if other.is_run_of(task)), None)
            if first is not None:
                message = f"the task {task.id} is the same run as {first.id}, and uses its results: nothing runs twice"
                self.findings.notice(self.tree, ("evaluation", "tasks"), message)
                # Only the first of them sets the run aside, or retries its errors.
                options = msgspec.structs.replace(task.file.options, fresh=False, retry_failed=False)
                task = replace(task, file=msgspec.structs.replace(task.file, options=options))
            tasks.append(task)
        return tuple(tasks)

    def _select(self, selection: Sequence[str]) -> list[tuple[int, int, TaskBlock]]:
        """List the selected tasks: index in the configuration, number among tasks of the same name, and block."""
        listed = self.tree.get("evaluation", "tasks")
        blocks: list[tuple[int, int, TaskBlock]] = []
        for index, data in enumerate(listed if isinstance(listed, list) else []):  # else it is a problem already
            entry = {"name": data} if isinstance(data, str) else data
            location: Location = ("evaluation", "tasks", index)
            block = validate_block(TaskBlock, entry, location, self.tree, self.findings.problems)
            if isinstance(block, TaskBlock):
                blocks.append((index, sum(other.name == block.name for _, _, other in blocks), block))
        ids = {index: {block.name, Path(block.name).stem} for index, _, block in blocks}
        for index, number, _ in blocks:
            ids[index] |= {f"{name}.{number}" for name in ids[index]}
        for name in selection:
            if not self.findings.problems and not any(name in names for names in ids.values()):
                names = [block.name for _, _, block in blocks]
                raise UsageError(f"-t {name}: no such task{suggest(name, names)}; there are {', '.join(names)}")
        return [entry for entry in blocks if not selection or ids[entry[0]] & set(selection)]

    def _read_task(self, index: int, number: int, block: TaskBlock) -> Task | None:
        location: Location = ("evaluation", "tasks", index)
        path = self._find_eval_file(block, (*location, "eval" if block.eval else "name"))
        document = None if path is None else self._read_document(path)
        translated = document is not None and find_format(document.data) is not None
        # Keys that begin with `config.` are of the older dialect, unless the eval file has such a block itself.
        older = OLDER[1:] if translated else OLDER
        config, values = self._read_config(location, block, older)
        variables = {**self.variables, **read_variables(self.tree, (*location, "env_vars"), self.findings)}
        add_wandb_server(self.tree, variables)
        if config is None or path is None or document is None:
            return None
        api_endpoint = config.target.api_endpoint
        if api_endpoint.api_key_name:
            variables[api_endpoint.api_key_name] = EnvVar(api_endpoint.api_key_name, "host", api_endpoint.api_key_name)
        is_benchmark = "benchmark" in document.data
        derived = [
            *self._target_overrides(block, api_endpoint, location, is_benchmark=is_benchmark),
            *self._param_overrides(config.config.params, values, is_benchmark=is_benchmark),
            *self._data_overrides(block, location, is_benchmark=is_benchmark),
            *_adapter_overrides(values, ("target", "api_endpoint", "adapter_config"), self.findings),
        ]
        written: list[Override] = [
            (tuple(key.split(".")), value)
            for key, value in (block.overrides or {}).items()
            if not key.startswith(older)
        ]
        written += self.overrides
        if is_benchmark and not _target_kinds(document, [*derived, *written]):
            if self.endpoint.default_model is None:
                self._report_no_model(location)
                return None
            derived.append((("target", "model"), self.endpoint.default_model))
        spec, overrides = self._load_eval(document, derived, written, location)
        if spec is None:
            return None
        serves = self.shared.deployment is not None
        check_api_keys(spec, variables, self.environ, self.findings, serves=serves)
        file = msgspec.structs.replace(
            self.shared,
            name=block.name,
            eval_file=str(path),
            overrides=tuple(overrides),
            container=self._container(block, location),
            env={**self.shared.env, **{variable.name: str(variable) for variable in variables.values()}},
            pre_cmd=block.pre_cmd or self.shared.pre_cmd,
            post_cmd=block.post_cmd or self.shared.post_cmd,
        )
        return Task(file, number, path, spec, translated, tuple(variables.values()))

    def _container(self, block: TaskBlock, location: Location) -> Container | None:
        """Return the container in which a task runs; None for a plain process."""
        if block.container is not None and self.container is not None:
            return msgspec.structs.replace(self.container, image=block.container)
        if block.container is not None:
            message = "container is not needed: Holdfast itself evaluates, in its own environment"
            self.findings.notice(self.tree, location, message)
        return None

    def _read_config(
        self, location: Location, block: TaskBlock, older: tuple[str, ...]
    ) -> tuple[EvaluatorConfig | None, Tree]:
        """Read the nemo_evaluator_config of a task, over the one of all tasks."""
        values = Tree()
        adapter: Location = ("target", "api_endpoint", "adapter_config")
        if isinstance(self.tree.get(*adapter), dict):  # for all tasks, too
            values = self.tree.below(adapter).at(("target", "api_endpoint", "adapter_config"))
        for outer in (("evaluation",), location):
            names = [name for name in ("nemo_evaluator_config", "config") if self.tree.get(*outer, name) is not None]
            if len(names) == 2:
                message = "is the older name of nemo_evaluator_config; give one of them"
                self.findings.wrong(self.tree, (*outer, "config"), message)
            if names:
                values = self.tree.below((*outer, names[0])).over(values)
        for key, value in (block.overrides or {}).items():
            if key.startswith(older):
                values.put(tuple(key.split(".")), value, self.tree.origin((*location, "overrides", key)))
        values = move_keys(values, MOVED_IN_TASKS, self.findings)
        config = validate_block(EvaluatorConfig, values.data, (), values, self.findings.problems)
        return cast("EvaluatorConfig | None", config), values

    def _find_eval_file(self, block: TaskBlock, location: Location) -> Path | None:
        name = block.eval or block.name
        candidates = list(_candidates(name, self.folder, self.cwd))
        for path in candidates:
            if path.is_file():
                return path.resolve()
        providers = installed_providers() if self.providers is None else self.providers
        if (file := find_file(name, providers)) is not None:
            return file
        places = ", ".join(map(str, candidates))
        error = unknown_task(name, providers)
        message = f"{error.message}; looked for {places}; `eval: PATH` names an eval file"
        self.findings.wrong(self.tree, location, message)
        return None

    def _target_overrides(
        self, block: TaskBlock, asked: ApiEndpoint, location: Location, *, is_benchmark: bool
    ) -> list[Override]:
        """Return overrides that replace the eval file's model by the measured one."""
        # A benchmark knows which API it needs, so the kind that a server is addressed by in general does not count.
        kind = block.endpoint_type or asked.type or (None if is_benchmark else self.endpoint.type)
        api = _APIS.get(kind or "undefined", kind)
        if api == kind and kind is not None and kind not in _APIS:
            message = f"endpoint type {kind!r} is not supported; there are chat and completions"
            self.findings.wrong(self.tree, (*location, "endpoint_type"), message)
            api = None
        url = asked.url or self.endpoint.base_url
        values = {
            "model": asked.model_id or self.endpoint.model,
            "base_url": None if url is None else api_root(url),
            "api_key_env": asked.api_key_name or self.endpoint.api_key_env,
            "api": api,
            "stream": asked.stream if asked.stream is not None else self.endpoint.stream,
            "version": self.endpoint.version,
        }
        if self.shared.deployment is not None and values["base_url"] is None and has_provider(str(values["model"])):
            values["base_url"] = f"${{{OPENAI.url_env}}}"  # the job's server, whatever the name looks like
        return [(("target", key), value) for key, value in values.items() if value is not None]

    def _report_no_model(self, location: Location) -> None:
        """Report a benchmark that neither the server nor the configuration gives a model."""
        if self.shared.deployment is not None:
            message = "must be given: it is the model that benchmarks ask the server for"
            self.findings.wrong(self.tree, ("deployment", "served_model_name"), message)
        else:
            message = "names no model to measure; name it with -m MODEL, or as target.api_endpoint.model_id"
            self.findings.wrong(self.tree, location, message)

    def _param_overrides(self, params: Params, values: Tree, *, is_benchmark: bool) -> list[Override]:
        """Translate params into keys of the eval file."""
        location: Location = ("config", "params")
        limit = params.limit_samples
        if limit is not None and limit > 1 and not float(limit).is_integer():
            message = "is a number of samples, or a share of them below 1"
            self.findings.wrong(values, (*location, "limit_samples"), message)
            return []
        overrides: list[Override] = [
            (path, int(value) if name == "limit_samples" and value >= 1 else value)
            for name, path in PARAMS.items()
            if (value := getattr(params, name)) is not None
        ]
        if not is_benchmark:
            for name in ("task", "extra"):
                if getattr(params, name):
                    message = "has no effect: the eval file defines what is asked and how it is graded"
                    self.findings.notice(values, (*location, name), message)
            return overrides
        for name, value in {"task": params.task, **(params.extra or {})}.items():
            if value is not None and name in BENCHMARK_PARAMS:
                overrides.append((BENCHMARK_PARAMS[name], value))
            elif value is not None:
                message = "has no effect on benchmarks, which Holdfast asks itself"
                self.findings.notice(values, (*location, "extra", name), message)
        return overrides

    def _data_overrides(self, block: TaskBlock, location: Location, *, is_benchmark: bool) -> list[Override]:
        """Return the override for the datasets of a benchmark. An eval file names its own."""
        if block.dataset_dir is None:
            return []
        if is_benchmark:
            return [(("benchmark", "data"), str(self.folder / block.dataset_dir))]
        message = f"no effect here, because {NO_TASK_CONTAINER.why}; write overrides: {{dataset.path: …}}"
        self.findings.notice(self.tree, (*location, "dataset_dir"), message)
        return []

    def _read_document(self, path: Path) -> Document | None:
        try:
            return read_eval(path)
        except ConfigError as error:
            self.findings.problems.extend(error.problems)
            return None

    def _load_eval(
        self, document: Document, derived: list[Override], written: list[Override], location: Location
    ) -> tuple[Eval | None, list[Override]]:
        """Load the eval with all overrides, so that mistakes are known before anything is submitted."""
        try:
            target = document.data.get("target")
            if isinstance(target, dict) and target.get("version") is not None:
                derived = [(key, value) for key, value in derived if key != ("target", "version")]
            if not _measures_model(document, derived, written):
                unused = [".".join(key) for key, _ in derived if key[0] == "target"]
                derived = [(key, value) for key, value in derived if key[0] != "target"]
                if unused:
                    message = f"its target is not a model, so these have no effect: {', '.join(unused)}"
                    self.findings.notice(self.tree, location, message)
            overrides = [*derived, *written]
            spec = load_any(document, overrides)
            if spec.limits.trial_timeout < spec.limits.turn_timeout:
                longer = spec.limits.turn_timeout * (spec.limits.retries + 1)
                overrides.append((("limits", "trial_timeout"), longer))
                spec = load_any(document, overrides)
        except ConfigError as error:
            self.findings.problems.extend(error.problems)
        except HoldfastError as error:
            self.findings.wrong(self.tree, location, str(error))
        else:
            if spec.samples == []:
                self.findings.wrong(self.tree, location, f"no sample of {document.path} is selected")
            self.findings.add_notices(spec.notices)
            if spec.document.data.get("baseline") is not None:
                message = "is not run here: add a task of the same eval, with its target under overrides"
                self.findings.notice(spec.document, ("baseline",), f"{message}, and use `holdfast compare`")
            return spec, overrides
        return None, []


def _measures_model(document: Document, derived: Sequence[Override], written: Sequence[Override]) -> bool:
    """Return True if the target is a model: by the overrides, else by the file. An eval without a target takes any."""
    kinds = _target_kinds(document, written)
    if not kinds and (find_format(document.data) is not None or document.data.get("target") is None):
        return any(key == ("target", "model") for key, _ in derived)
    return kinds == {"model"}


def _target_kinds(document: Document, overrides: Sequence[Override]) -> set[str]:
    """Return the kinds of target that a file and overrides name: `model`, `python` and so on."""
    changes = ({key[1]: value} if key[1:] else value for key, value in overrides if key[0] == "target")
    blocks = [document.data.get("target"), *changes]
    return {kind for block in blocks if isinstance(block, dict) for kind in TARGETS if kind in block}


def _candidates(name: str, folder: Path, cwd: Path) -> Iterable[Path]:
    """Return the paths at which an eval file of that name is looked for."""
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return dict.fromkeys([cwd / path, folder / path])
    return dict.fromkeys([folder / "evals" / f"{name}.yaml", cwd / f"{name}.yaml", cwd / "evals" / f"{name}.yaml"])


def move_keys(values: Tree, moves: Sequence[Move], findings: Findings) -> Tree:
    """Move values from old keys to new ones, with a notice for each. A value at the new key wins."""
    for old, new in moves:
        value = values.get(*old)
        if value is None:
            continue
        findings.notice(values, old, f"deprecated: use {format_location(new)}")
        moved = Tree()
        if isinstance(value, dict):
            moved = values.below(old).at(new)
        else:
            moved.put(new, value, values.origin(old))
        values.remove(old)
        values = values.over(moved)
    return values


_TRANSLATED = (
    *("use_system_prompt", "custom_system_prompt", "params_to_add", "process_reasoning_traces"),
    *("use_reasoning", "start_reasoning_token", "end_reasoning_token", "include_if_reasoning_not_finished"),
)
"""keys of an adapter that become overrides of the eval"""
_NEEDLESS = (
    *("mode", "use_caching", "caching_dir", "save_responses", "save_requests", "max_saved_requests"),
    *("max_saved_responses", "output_dir", "use_request_logging", "use_response_logging"),
    *("max_logged_requests", "max_logged_responses", "log_failed_requests", "use_progress_tracking"),
    *("progress_tracking_url", "progress_tracking_interval", "tracking_requests_stats"),
    *("logging_aggregated_stats_interval", "generate_html_report", "html_report_size", "include_json"),
    *("use_omni_info", "use_raise_client_errors", "endpoint_type", "track_reasoning", "discovery"),
    "post_eval_hooks",
)
"""keys for what Holdfast does anyway"""
_UNSUPPORTED = (
    *("params_to_remove", "params_to_rename", "headers_to_add", "headers_to_remove", "headers_to_rename"),
    "use_nvcf",
)
"""keys that would change answers"""
_INTERCEPTORS = {
    "system_message": {"system_message": "custom_system_prompt"},
    "payload_modifier": {"params_to_add": "params_to_add"},
    "reasoning": {
        "start_reasoning_token": "start_reasoning_token",
        "end_reasoning_token": "end_reasoning_token",
        "include_if_not_finished": "include_if_reasoning_not_finished",
    },
}
"""interceptors that have an effect here: settings of each, and the older keys they stand for"""
_NEEDLESS_INTERCEPTORS = (
    *("request_logging", "response_logging", "caching", "endpoint", "response_stats", "progress_tracking"),
    *("raise_client_errors", "log_failed_requests"),
)
_NEWER = ("interceptors", "post_eval_hooks", "discovery")
"""keys of the newer form, which excludes all older keys but these:"""
_WITH_NEWER = ("mode", "endpoint_type", "log_failed_requests")


def _adapter_overrides(tree: Tree, location: Location, findings: Findings) -> list[Override]:
    """Translate an `adapter_config` into overrides of the eval."""
    block = tree.get(*location)
    if not isinstance(block, dict):
        return []
    keys = (*_TRANSLATED, *_NEEDLESS, *_UNSUPPORTED, "interceptors")
    for key in block:
        if key not in keys:
            message = f"unknown key{suggest(key, keys)}; known here: {', '.join(keys)}"
            findings.wrong(tree, (*location, key), message)
        elif key in _UNSUPPORTED and block[key]:
            message = "not supported; may change the answers: put it into the eval file or the server"
            findings.notice(tree, (*location, key), message)
    older = [key for key in block if key not in _NEWER and key not in _WITH_NEWER]
    if older and not block.keys().isdisjoint(_NEWER):
        findings.wrong(tree, location, f"interceptors and the older keys ({', '.join(older)}) exclude each other")
    if needless := [key for key in block if key in _NEEDLESS]:
        message = f"not needed, Holdfast keeps every reply and counts by itself: {', '.join(needless)}"
        findings.notice(tree, location, message)
    if isinstance(block.get("interceptors"), list):
        block = _read_interceptors(block["interceptors"], tree, (*location, "interceptors"), findings)
    overrides: list[Override] = []
    if block.get("process_reasoning_traces") or block.get("use_reasoning"):
        overrides.append((("target", "strip_reasoning"), _thoughts(block)))
    if block.get("custom_system_prompt") and block.get("use_system_prompt", True):
        overrides.append((("system",), str(block["custom_system_prompt"])))
    if isinstance(block.get("params_to_add"), dict):
        overrides.extend((("target", "params", name), value) for name, value in block["params_to_add"].items())
    return overrides


def _thoughts(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return `target.strip_reasoning` for the keys of the adapter."""
    names = {"start": "start_reasoning_token", "end": "end_reasoning_token"}
    marks = {key: block[name] for key, name in names.items() if block.get(name) is not None}
    keep = block.get("include_if_reasoning_not_finished", True)
    return {**marks, **({} if keep in (None, True) else {"unfinished": "drop"})}


def _read_interceptors(listed: list[Any], tree: Tree, location: Location, findings: Findings) -> dict[str, Any]:
    """Return the older keys that a list of interceptors stands for, and note interceptors without effect."""
    block: dict[str, Any] = {}
    for number, entry in enumerate(listed):
        interceptor = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(interceptor, dict) or interceptor.get("enabled") is False:
            continue
        name, settings = interceptor.get("name"), interceptor.get("config") or {}
        keys = _INTERCEPTORS.get(str(name), {})
        unsupported = [key for key in settings if key not in keys] if name == "payload_modifier" else []
        if name not in _INTERCEPTORS and name not in _NEEDLESS_INTERCEPTORS:
            unsupported = [str(name)]
        if unsupported:
            message = f"{', '.join(unsupported)}: not supported; may change the answers: put it into the eval file"
            findings.notice(tree, (*location, number), message)
        block |= {keys[key]: value for key, value in settings.items() if key in keys}
        if name == "reasoning":
            block["process_reasoning_traces"] = True
    return block
