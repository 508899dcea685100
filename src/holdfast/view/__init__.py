"""Runs in the browser: a server on this machine that only reads.

`server`   the application, its sockets and its end
`guard`    who may ask, and what pages may do
`site`     the runs that are shown, and how a page is answered
`run_list` the list of runs
`trial_list` the table of trials
`run_pages` a run in numbers, a trial as a conversation, files
`counting` numbers of a run that its trials are counted for
`compare_pages` runs compared, two conversations side by side, evals and targets
`live`     numbers of runs that are being written, and streams of events
`jobs`     invocations on clusters
`columns`  the trials of a run as columns, opened from a cache, built and refreshed
`building` the helper process that builds the columns of a large run
`query`    the filter language
`snapshot` rows that a query selects, sorted and counted
`search`   texts in transcripts, searched in a helper process
`fields`   fields of the rows as columns
`reported` columns of a finished run, from its report
`chunks`   results and outputs divided into chunks, which several processes read
`results`  chunks of results as columns
`outputs`  chunks of outputs as rows
`recorded` columns of any other run, from its journals, extended as they grow
"""
