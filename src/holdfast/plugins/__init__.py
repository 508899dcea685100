"""Built-in plug-ins. They use the entry points and the public surface that anybody's plug-ins use.

`waza`       waza's eval and task files, and its results.json
`nat`        configurations of NeMo Agent Toolkit, its workflows and evaluators, and its output files
`flexeval`   flexeval's outputs.jsonl and metrics.json
`lm_eval`    results and samples of lm-eval
`benchmarks` benchmarks by name, compiled from lm-eval's tasks
`batches`    requests that providers answer in bulk, hours later
`exporters`  runs as tables, test reports and pages, and in services that keep runs

The core runs without them: `spec.plugins.BUILT_IN` names them in the way that entry points name other plug-ins.
"""
