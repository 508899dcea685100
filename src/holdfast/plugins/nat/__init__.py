"""NeMo Agent Toolkit (NAT): reads its configurations, and runs its workflows and evaluators in this process.

`read`       translates a configuration with an `eval` section into an eval
`dataset`    the dataset of such a configuration, and the names of its columns
`config`     a configuration, the parts of it that a workflow or an evaluator uses, and their code
`schema`     the blocks of the eval file: target, grader and `output.nat`
`components` a workflow as the target, and an evaluator as a grader
`library`    everything that imports NAT itself
`steps`      NAT's steps: read from its streams, converted to messages, and made from recorded calls
`export`     a run as the files of `nat eval`
`mirror`     workflow_output.jsonl, kept up to date during a run
"""
