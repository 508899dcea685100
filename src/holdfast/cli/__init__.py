"""The command line: one file per verb, each a page: parse, call, print."""

import gc

# Starting makes much and drops little: looking for garbage as often as by default is a tenth of its time. Set here,
# before the imports of the commands, which are most of it.
gc.set_threshold(100_000, 50, 1000)
