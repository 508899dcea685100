"""`python -m holdfast.cluster.node`, which scripts of jobs name that were submitted with an earlier version."""

import sys

from holdfast.cluster.job.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
