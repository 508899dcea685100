"""Benchmarks by name, a built-in plug-in: they are compiled into ordinary evals before a run.

`format`   the format of eval files with a `benchmark`, and the providers of benchmarks by name
`names`    the table of names, and the names and files of lm-eval's tasks
`cache`    compiled benchmarks of this user, and local copies of datasets
`compile`  a benchmark as a rows file and an eval document
`compiler` the program that compiles lm-eval's tasks, in a process of its own
`grading`  the program that grades with lm-eval's tasks
`native`   benchmarks that need no lm-eval, and the samples that the wheel carries
"""
