"""Keys of earlier launchers, moved to where they are today, and `adapter_config`.

There an adapter is a proxy between harness and model; Holdfast has none. What Holdfast records anyway is accepted,
a system prompt and parameters go into the eval, and whatever would change answers is reported as a problem.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cluster.config.provenance import Tree
from holdfast.spec.document import format_location
from holdfast.spec.validation import suggest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.spec.document import Location
    from holdfast.spec.findings import Findings
    from holdfast.spec.overrides import Override


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


DONE = ("use_system_prompt", "custom_system_prompt", "params_to_add")
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
    "use_reasoning",
    "process_reasoning_traces",
    "start_reasoning_token",
    "end_reasoning_token",
    "include_if_reasoning_not_finished",
    "interceptors",
)
NEW = ("interceptors", "post_eval_hooks", "discovery")
"""keys of the newer form, which may stand with these alone"""
WITH_NEW = ("mode", "endpoint_type", "log_failed_requests")


def adapter_overrides(tree: Tree, location: Location, findings: Findings) -> list[Override]:
    """Translate an `adapter_config` into overrides of the eval."""
    block = tree.get(*location)
    if not isinstance(block, dict):
        return []
    keys = (*DONE, *NEEDLESS, *CHANGES)
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
    overrides: list[Override] = []
    if block.get("custom_system_prompt") and block.get("use_system_prompt", True):
        overrides.append((("system",), str(block["custom_system_prompt"])))
    if isinstance(block.get("params_to_add"), dict):
        overrides.extend((("target", "params", name), value) for name, value in block["params_to_add"].items())
    return overrides
