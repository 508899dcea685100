"""Keys of earlier launchers, moved to where they are today, and `adapter_config`.

There an adapter is a proxy between harness and model; Holdfast has none. What Holdfast records anyway is accepted,
a system prompt, parameters and the removal of reasoning go into the eval, and whatever else would change answers is
noted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.cluster.config.provenance import Tree
from holdfast.spec.document import format_location
from holdfast.spec.validation import suggest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.spec.document import Location
    from holdfast.spec.overrides import Override
    from holdfast.spec.validation import Findings


Move = tuple[tuple[str, ...], tuple[str, ...]]
MOVED: tuple[Move, ...] = ((("execution", "auto_export", "configs"), ("export",)),)
"""in a configuration"""
MOVED_IN_TASKS: tuple[Move, ...] = (
    (("config", "target"), ("target",)),
    (("config", "params", "max_tokens"), ("config", "params", "max_new_tokens")),
)
"""in the nemo_evaluator_config of a task"""


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


DONE = (
    "use_system_prompt",
    "custom_system_prompt",
    "params_to_add",
    "process_reasoning_traces",
    "use_reasoning",
    "start_reasoning_token",
    "end_reasoning_token",
    "include_if_reasoning_not_finished",
)
NEEDLESS = (
    "mode",
    "use_caching",
    "caching_dir",
    "save_responses",
    "save_requests",
    "max_saved_requests",
    "max_saved_responses",
    "output_dir",
    "use_request_logging",
    "use_response_logging",
    "max_logged_requests",
    "max_logged_responses",
    "log_failed_requests",
    "use_progress_tracking",
    "progress_tracking_url",
    "progress_tracking_interval",
    "tracking_requests_stats",
    "logging_aggregated_stats_interval",
    "generate_html_report",
    "html_report_size",
    "include_json",
    "use_omni_info",
    "use_raise_client_errors",
    "endpoint_type",
    "track_reasoning",
    "discovery",
    "post_eval_hooks",
)
CHANGES = (
    "params_to_remove",
    "params_to_rename",
    "headers_to_add",
    "headers_to_remove",
    "headers_to_rename",
    "use_nvcf",
)
INTERCEPTORS = {
    "system_message": {"system_message": "custom_system_prompt"},
    "payload_modifier": {"params_to_add": "params_to_add"},
    "reasoning": {
        "start_reasoning_token": "start_reasoning_token",
        "end_reasoning_token": "end_reasoning_token",
        "include_if_not_finished": "include_if_reasoning_not_finished",
    },
}
"""interceptors that have an effect here: settings of each, and the older keys they stand for"""
NEEDLESS_INTERCEPTORS = (
    *("request_logging", "response_logging", "caching", "endpoint", "response_stats", "progress_tracking"),
    *("raise_client_errors", "log_failed_requests"),
)
NEW = ("interceptors", "post_eval_hooks", "discovery")
"""keys of the newer form, which may stand with these alone"""
WITH_NEW = ("mode", "endpoint_type", "log_failed_requests")


def adapter_overrides(tree: Tree, location: Location, findings: Findings) -> list[Override]:
    """Translate an `adapter_config` into overrides of the eval."""
    block = tree.get(*location)
    if not isinstance(block, dict):
        return []
    keys = (*DONE, *NEEDLESS, *CHANGES, "interceptors")
    for key in block:
        if key not in keys:
            message = f"unknown key{suggest(key, keys)}; known here: {', '.join(keys)}"
            findings.wrong(tree, (*location, key), message)
    older = [key for key in block if key not in NEW and key not in WITH_NEW]
    if older and any(key in block for key in NEW):
        findings.wrong(tree, location, f"interceptors and the older keys ({', '.join(older)}) exclude each other")
    needless = [key for key in block if key in NEEDLESS]
    if needless:
        message = f"not needed, Holdfast keeps every reply and counts by itself: {', '.join(needless)}"
        findings.notice(tree, location, message)
    for key in block:
        if key in CHANGES and block[key]:
            message = "not supported; may change the answers: put it into the eval file or the server"
            findings.notice(tree, (*location, key), message)
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
    """Return the older keys that a list of interceptors stands for; those that have no effect here are noted."""
    block: dict[str, Any] = {}
    for number, entry in enumerate(listed):
        interceptor = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(interceptor, dict) or interceptor.get("enabled") is False:
            continue
        name, settings = interceptor.get("name"), interceptor.get("config") or {}
        keys = INTERCEPTORS.get(str(name), {})
        unsupported = [key for key in settings if key not in keys] if name == "payload_modifier" else []
        if name not in INTERCEPTORS and name not in NEEDLESS_INTERCEPTORS:
            unsupported = [str(name)]
        if unsupported:
            message = f"{', '.join(unsupported)}: not supported; may change the answers: put it into the eval file"
            findings.notice(tree, (*location, number), message)
        block |= {keys[key]: value for key, value in settings.items() if key in keys}
        if name == "reasoning":
            block["process_reasoning_traces"] = True
    return block
