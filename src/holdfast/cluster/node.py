"""`python -m holdfast.cluster.node` is `python -m holdfast.cluster.job.node`: scripts of submitted jobs name it."""

import sys

from holdfast.cluster.job.node import main

if __name__ == "__main__":
    sys.exit(main())
