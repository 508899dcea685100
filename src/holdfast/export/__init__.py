"""Runs for other tools.

`result`    a run as `holdfast.evaluate` returns it
`samples`   transcripts as one readable JSONL
`tables`    CSV and Parquet
`junit`     a test report for CI
`html`      a page to read and to send
`comparison` runs compared, as a page to send
`live`      exporters that follow a run while it is going on
`names`     names of graders as other tools can have them
`after_run` what an eval file and a command ask for when a run has ended, and results and transcripts in a folder
`wandb`     Weights & Biases, also offline
`mlflow`    an MLflow tracking server
`tracking`  what those two have in common
`registry`  one way to all of them, which notes in `exports.json` how each went
"""
