"""Runs in the browser: a server on this machine that only reads.

`server`   the application, its sockets and its end
`guard`    who may ask, and what pages may do
`site`     the runs that are shown, and how a page is answered
`run_list` the list of runs
"""
