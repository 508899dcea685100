"""Shows the progress of a run, and prints everything else.

`terminal` the only way to print: control characters in names and answers are spelled out
`types`    the interface between the engine and its displays
`displays` displays of a run in progress: rich, plain, json or none
`format`   numbers, durations and progress as text, and tables for notebooks
`grid`     tables that fit the terminal, the console, and long output through a pager
"""
