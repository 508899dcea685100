"""The command line: one file per verb, each a page: parse, call, print."""

import gc

# Starting allocates much and frees little: by default, a tenth of that time would be garbage collection. This is set
# before the imports of the commands, which take most of the time.
gc.set_threshold(100_000, 50, 1000)
