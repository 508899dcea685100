"""Benchmarks by name, compiled into ordinary evals before a run.

`names`     the table of names, and lm-eval's names
`index`     the files that define lm-eval's tasks
`data`      mirrors of the Hugging Face hub on disk
`cache`     compiled benchmarks of this user
`progress`  notes about work that takes its time
`compile`   a benchmark as a rows file and an eval document
`compiler`  the program that compiles, in a process of its own
`grading`   the program that grades with tasks of lm-eval
`metrics`   metrics of lm-eval's tasks, and the graders that compute them
`native`    benchmarks that need no lm-eval, and the samples that the wheel carries
"""
