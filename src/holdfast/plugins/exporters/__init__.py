"""Runs for other tools.

`tables`   tables of trials as CSV and Parquet
`junit`    a test report for CI
`html`     a run, or runs compared, as a page to read and to send
`wandb`    Weights & Biases, also offline
`mlflow`   an MLflow tracking server
`tracking` what the last two share
"""
