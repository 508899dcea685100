"""Run as a script, shut in: assertions as JSON on standard input, what each came to as JSON on standard output."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path


def main() -> None:
    """Evaluate each in names of its own; one that raises has failed, and says why."""
    asked = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what assertions print is not the answer
    answer.write("ready\n")
    answer.flush()  # whatever happens from here on is the assertions' doing
    results = []
    for assertion in asked["assertions"]:
        names = {**json.loads(json.dumps(asked["names"])), "re": re, "json": json, "math": math}
        names["workspace"] = Path.cwd()
        try:
            # As globals, and not as locals, they are also known inside generator expressions and lambdas.
            results.append([bool(eval(assertion.strip(), names)), ""])  # noqa: S307
        except Exception as error:
            results.append([False, f"{type(error).__name__}: {error}"])
    json.dump(results, answer)
    answer.close()


if __name__ == "__main__":
    main()
