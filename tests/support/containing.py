"""Runs one program as Holdfast does, and can be killed like it.

    python -m tests.support.containing SECONDS PROGRAM [ARGUMENT …]

Prints what contains the program and its process id when it has begun; its exit code, or `time-out`, when all is over.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from holdfast.containment.program import running


async def main() -> None:
    """Run the program."""
    environment = dict(os.environ)
    try:
        async with running(sys.argv[2:], folder=Path.cwd(), environment=environment) as program:
            print(program.kind, program.pid, flush=True)
            code: object = await asyncio.wait_for(program.wait(), float(sys.argv[1]))
    except TimeoutError:
        code = "time-out"
    print(code, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
