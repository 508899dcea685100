"""Runs in the browser: a read-only server, its pages, and the columns that let it answer fast.

`table`    typed columns of trials, in memory and as one checked file
`reported` columns of a finished run, from results.json and outputs.jsonl
`recorded` columns of any other run, from its journals, extended as they grow
`columns`  columns of a run: opened from the cache, built, refreshed
`query`    the filter language
`snapshot` rows that a query selects, sorted and counted
`search`   texts in transcripts, searched in a helper process
"""
