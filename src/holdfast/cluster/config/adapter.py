"""`adapter_config`: what stands between harness and model elsewhere. Holdfast has no such proxy.

What it keeps and counts anyway is taken as said; a system prompt and parameters go into the eval; what would change the
answers and cannot be done here is named, so that nobody compares numbers that do not compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import Problem
from holdfast.spec.validation import suggest

if TYPE_CHECKING:
    from holdfast.cluster.config.provenance import Tree
    from holdfast.spec.document import Location

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


def adapter_overrides(
    tree: Tree, location: Location, problems: list[Problem], notices: list[str]
) -> list[tuple[tuple[str, ...], Any]]:
    """What an `adapter_config` means for the eval."""
    block = tree.get(*location)
    if not isinstance(block, dict):
        return []
    known = (*DONE, *NEEDLESS, *CHANGES)
    for key in block:
        if key not in known:
            message = f"unknown key{suggest(key, known)}; known here: {', '.join(known)}"
            problems.append(Problem(tree.where((*location, key)), message))
    older = [key for key in block if key not in NEW and key not in WITH_NEW]
    if older and any(key in block for key in NEW):
        said = f"interceptors and the older keys ({', '.join(older)}) cannot stand together"
        problems.append(Problem(tree.where(location), said))
    needless = [key for key in block if key in NEEDLESS]
    if needless:
        said = f"not needed, Holdfast keeps every reply and counts by itself: {', '.join(needless)}"
        notices.append(f"{tree.where(location)}: {said}")
    undone = "NOT done here, and it may change the answers; put it into the eval file or the server"
    notices.extend(f"{tree.where((*location, key))}: {undone}" for key in block if key in CHANGES and block[key])
    found: list[tuple[tuple[str, ...], Any]] = []
    if block.get("custom_system_prompt") and block.get("use_system_prompt", True):
        found.append((("system",), str(block["custom_system_prompt"])))
    if isinstance(block.get("params_to_add"), dict):
        found.extend((("target", "params", name), value) for name, value in block["params_to_add"].items())
    return found
