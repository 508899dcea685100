"""The command line: one file per verb, each a page: parse, call, print."""
