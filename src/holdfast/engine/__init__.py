"""The run itself: one sliding window of trials, whatever the target and the place.

`options`   what the command line says about this attempt at a run
`setup`     from an eval to an open run directory and a plan
`loop`      the window of trials: generate, keep, grade, keep
`attempts`  time-outs, retries and what is a fault of all
`window`    how many at once
`brake`     why and how a run stops early
`progress`  the numbers a display shows
`finish`    results.json, metrics.json
"""
