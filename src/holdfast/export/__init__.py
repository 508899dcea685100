"""Runs for other tools.

`live`      what a run exports while it goes on, and the way to all other exporters
`registry`  exports of a run that has ended; `exports.json` records how each went
`result`    a run as `holdfast.evaluate` returns it
`tables`    transcripts as JSON lines, tables as CSV and Parquet
`junit`     a test report for CI
`html`      a run, or runs compared, as a page to read and to send
`wandb`     Weights & Biases, also offline
`mlflow`    an MLflow tracking server
`tracking`  what the last two have in common
"""
