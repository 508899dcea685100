"""NeMo Agent Toolkit (NAT): reads its configurations, and runs its workflows and evaluators in this process.

`schema`    the blocks of the eval file: target, grader and `output.nat`
`config`    a configuration, and the parts of it that a workflow or an evaluator uses, and their code
`stream`    the inner steps that `nat serve` reports in its streams
`trace`     tool calls out of the steps that a workflow reports, and steps out of messages
`library`   everything that imports NAT itself
`target`    a workflow as the target, and `grader`, an evaluator as a grader
`format`    recognizes configurations
`read`      translates a configuration with an `eval` section into an eval
`dataset`   the dataset of such a configuration, and the names of its columns
`export`    the files of `nat eval`, of a run
`steps`     the model and tool calls of a trial as NAT's steps
`mirror`    workflow_output.jsonl while a run is going on
"""
