"""Runs for other tools.

`reading`   a run directory's trials, whole and in the dataset's order, from its path alone
`samples`   transcripts as one readable JSONL
`tables`    CSV and Parquet
`nat`       NeMo Agent Toolkit: workflow_output.json, <evaluator>_output.json
`flexeval`  outputs.jsonl, metrics.json
`folder`    results and transcripts in a folder of the user's
"""
