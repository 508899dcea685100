"""Runs in the browser: a server on this machine that only reads.

`server`   the application, its sockets and its end
`guard`    decides who may ask, and what pages may do
`site`     the runs that are shown, and how a page is answered
`run_list` the list of runs
`trial_list` the table of trials
`run_pages` a run in numbers, a trial as a conversation, files
`counting` numbers of a run that need a count of its trials
`compare_pages` runs compared, two conversations side by side, evals and targets
`live`     numbers of runs that are being written, and streams of events
`jobs`     invocations on clusters
`columns`  the trials of a run as a table, opened, made and refreshed
`query`    the filter language
`snapshot` rows that a query selects, sorted and counted
`search`   texts in transcripts, searched in a helper process
"""
