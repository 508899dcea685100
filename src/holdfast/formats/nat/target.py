"""A workflow of NeMo Agent Toolkit as the target, run in this process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import msgspec

from holdfast.errors import AttemptError, Fault, HoldfastError
from holdfast.formats.nat.config import identity_of, read_config, workflow_part
from holdfast.formats.nat.library import Workflow, load_workflow_config
from holdfast.formats.nat.schema import NatTarget
from holdfast.formats.nat.stream import usage_of
from holdfast.formats.nat.trace import messages_of
from holdfast.functions import describe_error
from holdfast.targets.types import Reply, Target

if TYPE_CHECKING:
    from holdfast.spec.eval import Origin
    from holdfast.targets.types import Turn


class NatWorkflow(Target):
    """Builds the workflow once per process and runs it for each turn."""

    schema = NatTarget
    extra = "nat"

    def __init__(self, block: NatTarget, origin: Origin) -> None:
        super().__init__(block, origin)
        config = load_workflow_config(origin.folder / block.nat, block.override, origin.where("nat"))
        self._workflow = Workflow(config, block.result_json_path, origin.where("result_json_path"))
        self.notices = self._workflow.notices
        self._name = block.nat

    @classmethod
    def identity(cls, block: NatTarget, origin: Origin) -> dict[str, Any]:
        """Return the part of the configuration that the workflow uses, and the code of its components."""
        part = workflow_part(read_config(origin.folder / block.nat, block.override))
        identity = {**identity_of(part, origin.folder), "version": block.version}
        path = block.result_json_path
        return identity if path == "$" else {**identity, "result_json_path": path}

    async def __aenter__(self) -> Self:
        try:
            await self._workflow.open()
        except HoldfastError:
            raise
        except Exception as error:  # raised by a component
            message = f"the workflow of {self._name} cannot be built: {describe_error(error)}"
            raise Fault("rejected", message, remedy="Fix it, then run the same command again.") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._workflow.close()

    async def reply(self, turn: Turn) -> Reply:
        """Run the workflow; its tool calls are in the reply's messages, all its steps in the trace."""
        # In a separate task, since NAT's context variables must not reach the next trial of this worker.
        task = asyncio.create_task(self._workflow.run(turn.messages))
        try:
            answer = await task
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise AttemptError("agent", "the workflow was cancelled from inside") from error
        except Exception as error:  # raised by the workflow: an error of this trial, never of the run
            refused = isinstance(error, TypeError) and len(turn.messages) > 1
            raise AttemptError("agent", describe_error(error), retry=not refused) from error
        text, trace, value = answer
        messages = messages_of(trace, text)
        reply = Reply(text=text, messages=messages, usage=usage_of(trace), trace=trace, value=value)
        return msgspec.json.decode(msgspec.json.encode(reply), type=Reply)
