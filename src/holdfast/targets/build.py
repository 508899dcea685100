"""From what the eval file says to a target, and to what of it belongs into the key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.functions import function_source
from holdfast.spec.fingerprint import command_files
from holdfast.spec.redact import shown_url
from holdfast.spec.schema import CommandTarget, HttpTarget, MockTarget, ModelTarget, NatTarget, PythonTarget
from holdfast.targets.endpoints import base_urls
from holdfast.targets.prices import Prices
from holdfast.targets.tools import Toolbox, tools_identity

if TYPE_CHECKING:
    from holdfast.spec.load import Eval
    from holdfast.targets.types import Target


def build_target(spec: Eval) -> Target:
    """The target, ready to be opened. Kinds that are not used are not imported."""
    where = spec.document.where(("target",))
    match spec.target:
        case ModelTarget() as block:
            from holdfast.targets.model import Model

            tools = Toolbox(block.tools, spec) if block.tools else None
            return Model(block, Prices(block.model, spec.prices), tools, spec.document.where(("target", "model")))
        case PythonTarget() as block:
            from holdfast.targets.python import PythonFunction

            return PythonFunction(block, spec)
        case HttpTarget() as block:
            from holdfast.targets.http import HttpWorkflow

            return HttpWorkflow(block, where)
        case CommandTarget() as block:
            from holdfast.targets.command import Command

            return Command(block, spec)
        case NatTarget() as block:
            from holdfast.targets.nat import NatWorkflow

            return NatWorkflow(block, spec)
        case MockTarget():
            from holdfast.targets.mock import Mock

            return Mock()


def target_identity(spec: Eval) -> dict[str, Any]:
    """What of the target can change an answer."""
    match spec.target:
        case ModelTarget() as block:
            identity = block.model_dump(include={"model", "api", "params", "version"})
            if block.identity == "url":
                urls = sorted(shown_url(url) for url in base_urls(block.base_url, ""))
                identity["base_url"] = urls if isinstance(block.base_url, list) or len(urls) > 1 else urls[0]
            if block.tools:
                identity |= {"tools": tools_identity(block.tools, spec), "max_steps": block.max_steps}
            return {"kind": "model", **identity}
        case PythonTarget() as block:
            where = spec.document.where
            name, files = function_source(block.python, spec.folder, where(("target", "python")), spec.functions)
            files = {**files}  # a copy: the scan of a file is shared by all that ask for it
            identity = {"function": name, "source": files, "params": block.params, "version": block.version}
            if block.tools:
                identity["tools"] = tools_identity(block.tools, spec)
            if block.state is not None:
                for key, hook in (("save", block.state.save), ("restore", block.state.restore)):
                    files |= function_source(hook, spec.folder, where(("target", "state", key)), spec.functions)[1]
            return {"kind": "python", **identity}
        case HttpTarget() as block:
            identity = block.model_dump(include={"http", "request", "response", "version"})
            if block.stream_end not in (None, "close"):  # what follows the marker is not read
                identity["stream_end"] = block.stream_end
            return {"kind": "http", **identity, "http": shown_url(block.http)}
        case CommandTarget() as block:
            identity = block.model_dump(include={"command", "stdin", "version"})
            later = {"env", "working_directory", "path"}
            identity |= block.model_dump(include=later, exclude_defaults=True)
            return {"kind": "command", **identity, "files": command_files(spec.folder, block.command)}
        case NatTarget() as block:
            from holdfast.formats.nat.config import identity_of, read_config, workflow_part

            part = workflow_part(read_config(spec.folder / block.nat, block.override))
            return {"kind": "nat", **identity_of(part, spec.folder), "version": block.version}
        case MockTarget() as block:
            return {"kind": "mock", **block.model_dump()}
