"""Find code of an eval that keys do not cover, so that a change of it would not be noticed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval


def unseen_code(spec: Eval) -> Iterator[str]:
    """Describe each program that is not completely covered by the key."""
    for location, command in _commands(spec):
        from holdfast.spec.fingerprint import computed_imports

        for place in dict.fromkeys(computed_imports(spec.folder, command)):
            yield (
                f"{spec.document.where(location)}: {place} changes sys.path, or imports modules by names that it "
                "computes: modules found only that way are not part of the key. After a change of one, use --fresh."
            )
    for number, hook in enumerate(() if spec.hooks is None else spec.hooks.before_task):
        from holdfast.spec.fingerprint import is_file
        from holdfast.spec.named_inputs import is_named

        for word in hook.arguments:
            path = os.path.normpath(f"{hook.working_directory}/{word}")
            if is_file(spec.folder / path) and not is_named(spec, path):
                yield (
                    f"{spec.document.where(('hooks', 'before_task', number))}: {word} is part of no key. If answers "
                    f'depend on it, write `files: {{target: [{path}]}}`, and else `files: ["!{path}"]`.'
                )


def _commands(spec: Eval) -> Iterator[tuple[Location, Sequence[str]]]:
    if spec.target.command_line:
        yield ("target", "command"), spec.target.command_line
    for number, tool in enumerate(getattr(spec.target, "tools", ())):
        if tool.mcp is not None:
            yield ("target", "tools", number, "mcp", "command"), tool.mcp.command
    for location, grader in spec.placed_graders():
        if grader.program:
            yield (*location, "command"), grader.program
