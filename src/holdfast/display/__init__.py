"""Shows the progress of a run, and prints everything else.

`terminal` the only way to print: control characters in names and answers are spelled out
`displays` displays of a run in progress: their interface to the engine; rich, plain, json or none
`format`   numbers, durations and messages as text, and tables for notebooks
`grid`     tables that fit the terminal, the console, and long output through a pager
"""
