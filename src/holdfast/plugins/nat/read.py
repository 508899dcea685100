"""Translate a NAT configuration with an `eval` section into an equivalent eval file.

The workflow becomes a `nat` target, each evaluator a `nat` grader. Nothing is ignored silently: a notice names keys
that have no effect here or in NAT, and keys that would change the numbers are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast import Document, Format
from holdfast.errors import suggest
from holdfast.plugins.nat.config import SECTIONS, read_config
from holdfast.plugins.nat.dataset import KEYED, Reader
from holdfast.plugins.nat.library import has_profiler, is_installed
from holdfast.spec.document import format_location
from holdfast.spec.schema import SCHEMA_VERSION, Findings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast import Override
    from holdfast.spec.document import Location

_GENERAL: Final = frozenset(
    {"max_concurrency", "workflow_alias", "output_dir", "output", "dataset", "per_input_user_id", "profiler"}
)
_GENERAL_IGNORED: Final = {
    "validate_llm_endpoints": "a model that cannot be reached stops the run with its first trial",
}
_OUTPUT_REFUSED: Final = {
    "remote_dir": "nothing is uploaded to S3; upload the folder when the run is finished",
    "s3": "nothing is uploaded to S3; upload the folder when the run is finished",
    "custom_pre_eval_process_function": "outputs are graded as they are; prepare them in an evaluator",
    "custom_scripts": "run the scripts with `hooks: {after_run: …}` of an eval file, or by hand",
}
_OUTPUT_IGNORED: Final = {
    "cleanup": "nothing is deleted: files of an earlier run are replaced when this one writes its own",
    "job_management": "a run has its own directory and its own id",
    "write_atif_workflow_output": "ATIF files are not written",
}
_DEFAULT_DIR: Final = "./.tmp/nat/examples/default/"
_DEFAULT_CONCURRENCY: Final = 8
_MEASURES: Final = frozenset({"avg_llm_latency", "avg_workflow_runtime", "avg_num_llm_calls", "avg_tokens_per_llm_end"})
"""NAT's evaluators whose numbers are seconds, calls and tokens"""


class Nat(Format):
    """Configurations of NeMo Agent Toolkit, which have no versions."""

    def recognizes(self, data: Mapping[str, Any]) -> bool:
        sections = any(isinstance(data.get(key), dict) for key in ("workflow", "eval"))
        return (sections or isinstance(data.get("base"), str)) and data.keys().isdisjoint(("graders", "schemaVersion"))

    def translate(self, document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]]:
        return translate(document, overrides)


def translate(document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]]:
    """Return the eval as a document of Holdfast, and the overrides that are still to be applied.

    Overrides of NAT's own keys, as `llms.main.temperature=0` or `eval.general.max_concurrency=2`, change its file.
    """
    assert document.path is not None
    nat_values = {format_location(key): value for key, value in overrides if key[0] in SECTIONS}
    remaining = [(key, value) for key, value in overrides if key[0] not in SECTIONS]
    return _Translation(document, nat_values).document(), remaining


class _Translation:
    """Translates one configuration."""

    def __init__(self, document: Document, override: dict[str, Any]) -> None:
        assert document.path is not None
        self._document = document
        self._data = read_config(document.path, override)
        self._name = document.path.name
        self._all_overrides = override
        self._override = {path: value for path, value in override.items() if not path.startswith("eval.")}
        self._findings = Findings()

    def document(self) -> Document:
        """Return the translated document; raise ConfigError with all problems of the file."""
        self._check_sections()
        general = self._block(("eval", "general"))
        self._check(
            ("eval", "general"),
            general,
            _GENERAL | _GENERAL_IGNORED.keys(),
            refused={},
            ignored=_GENERAL_IGNORED,
        )
        if general.get("per_input_user_id") is False:
            message = "not supported: each trial runs as a user of its own, so that no trial depends on those before it"
            self._wrong(("eval", "general", "per_input_user_id"), message)
        path = self._document.path
        assert path is not None
        dataset = self._block(("eval", "general", "dataset"))
        rows = Reader(dataset, self._document, self._findings).read()
        if not isinstance(self._data.get("workflow"), dict):
            self._wrong(("workflow",), "is missing: it is what is evaluated")
        graders, origins = self._graders({key: dataset[key] for key in KEYED if key in dataset})
        target: dict[str, Any] = {"nat": self._name}
        if self._override:
            target["override"] = self._override
        data: dict[str, Any] = {
            "schemaVersion": SCHEMA_VERSION,
            "name": self._title(general),
            "dataset": rows.block,
            "target": target,
            "prompt": rows.prompt,
            "same_prompt": True,
            "graders": graders,
            "limits": {"concurrency": general.get("max_concurrency", _DEFAULT_CONCURRENCY)},
            "output": {"nat": self._output(general, dataset)},
        }
        self._findings.raise_problems()
        origins |= {
            ("name",): (self._document, ("workflow",)),
            ("dataset",): (self._document, ("eval", "general", "dataset")),
            ("dataset", "path"): (self._document, ("eval", "general", "dataset", "file_path")),
            ("prompt",): (self._document, ("eval", "general", "dataset", "structure", "question_key")),
            ("target",): (self._document, ("workflow",)),
            ("limits",): (self._document, ("eval", "general")),
            ("output",): (self._document, ("eval", "general", "output")),
        }
        return Document(data, path, elsewhere=origins, notices=self._findings.notices)

    def _check_sections(self) -> None:
        for key in self._data:
            if key not in SECTIONS:
                self._wrong((key,), f"unknown key{suggest(key, SECTIONS)}")
        if not isinstance(self._data.get("eval"), dict):
            advice = (
                f"to evaluate the workflow with other data, write an eval file with `target: {{nat: {self._name}}}`"
            )
            self._wrong(("eval",), f"is missing; {advice}")
        for key in self._block(("eval",)):
            if key not in ("general", "evaluators"):
                self._notice(("eval", key), f"NAT has no such key{suggest(key, ('general', 'evaluators'))}: no effect")

    def _title(self, general: Mapping[str, Any]) -> str:
        workflow = self._data.get("workflow")
        kind = workflow.get("_type") if isinstance(workflow, dict) else None
        return str(general.get("workflow_alias") or kind or Path(self._name).stem)

    def _graders(
        self, dataset: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[Location, tuple[Document, Location]]]:
        graders: list[dict[str, Any]] = []
        origins: dict[Location, tuple[Document, Location]] = {}
        for name, block in self._block(("eval", "evaluators")).items():
            place: Location = ("eval", "evaluators", name)
            if not isinstance(block, dict) or not isinstance(block.get("_type"), str):
                self._wrong(place, "must be an evaluator's block with a `_type`")
                continue
            grader: dict[str, Any] = {"type": "nat", "name": name, "evaluator": name, "config_file": self._name}
            grader["dataset"] = dataset
            if self._override:
                grader["override"] = self._override
            if block["_type"].rpartition("/")[2] in _MEASURES:
                grader["measure"] = True
                self._notice(place, "is a measurement: its numbers are kept with the grades, and are no score")
            origins[("graders", len(graders))] = (self._document, place)
            graders.append(grader)
        return graders, origins

    def _output(self, general: Mapping[str, Any], dataset: dict[str, Any]) -> dict[str, Any]:
        output = self._block(("eval", "general", "output"))
        allowed = {"dir", "workflow_output_step_filter", *_OUTPUT_IGNORED}
        self._check(("eval", "general", "output"), output, allowed, refused=_OUTPUT_REFUSED, ignored=_OUTPUT_IGNORED)
        folder = output.get("dir") or general.get("output_dir") or _DEFAULT_DIR
        block: dict[str, Any] = {"dir": str(Path.cwd() / str(folder))}  # as NAT has it
        block |= {"dataset": {key: dataset[key] for key in KEYED if key in dataset}, "config_file": self._name}
        if self._all_overrides:
            block["override"] = self._all_overrides
        if profiler := self._block(("eval", "general", "profiler")):
            block["profiler"] = profiler
            if is_installed() and not has_profiler():
                message = "its files are not written without nvidia-nat-profiler: pip install nvidia-nat-profiler"
                self._notice(("eval", "general", "profiler"), message)
        if (steps := output.get("workflow_output_step_filter")) is not None:
            block["step_filter"] = steps
        return block

    def _check(
        self,
        location: Location,
        block: Mapping[str, Any],
        allowed: Sequence[str] | frozenset[str] | set[str],
        *,
        refused: Mapping[str, str],
        ignored: Mapping[str, str],
    ) -> None:
        for key, value in block.items():
            if key in refused:
                if value not in (None, {}, [], ""):
                    unset = f"{format_location((*location, key))}=null"
                    message = (
                        f"not supported: {refused[key]}. To run without: holdfast eval {self._document.path} {unset}"
                    )
                    self._wrong((*location, key), message)
            elif key in ignored:
                if value not in (None, False, {}):
                    self._notice((*location, key), ignored[key])
            elif key not in allowed:  # which NAT ignores without a word
                hint = suggest(key, (*allowed, *refused))
                self._notice((*location, key), f"NAT has no such key{hint}: no effect")

    def _block(self, location: Location) -> dict[str, Any]:
        node: Any = self._data
        for part in location:
            node = node.get(part) if isinstance(node, dict) else None
        if node is not None and not isinstance(node, dict):
            self._wrong(location, "must be a mapping of keys to values")
        return node if isinstance(node, dict) else {}

    def _wrong(self, location: Location, message: str) -> None:
        self._findings.wrong(self._document, location, message)

    def _notice(self, location: Location, message: str) -> None:
        self._findings.notice(self._document, location, message)
