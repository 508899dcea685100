"""Built-in plug-ins for files of other tools: their evals run unchanged, and runs are exported to their files.

`waza`     waza's eval and task files, and its results.json
`nat`      configurations of NeMo Agent Toolkit, its workflows and evaluators, and its output files
`flexeval` flexeval's outputs.jsonl and metrics.json
`lm_eval`  results and samples of lm-eval

No other package imports these: `spec.plugins.BUILT_IN` names them in the way that entry points name other plug-ins.
"""
