"""Fail every system call on a run's files in turn: `python -m bench.failing_calls [SCENE…]`, about an hour.

Needs strace. Prints each failure that ended wrongly, and how many ended well. The test suite has a sample of these.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.support.failing_calls import SCENES, Scene
from tests.support.running import server


def main() -> int:
    """Go through the scenes that are named, or all."""
    wrong = 0
    for name in sys.argv[1:] or SCENES:
        began, endings = time.monotonic(), Counter[str]()
        with server() as provider, tempfile.TemporaryDirectory(prefix="holdfast-calls-") as folder:
            scene = Scene.make(name, Path(folder), provider)
            for failure in list(scene.failures()):
                try:
                    endings[scene.fail(failure)] += 1
                except AssertionError as error:
                    wrong += 1
                    print(f"{name}: {failure}\n    " + str(error).replace("\n", "\n    "), flush=True)
        counts = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
        print(f"{name}: {counts}; {wrong} wrong so far; {time.monotonic() - began:.0f} s", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
