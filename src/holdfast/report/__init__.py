"""Numbers from verdicts.

Counting:
`stats`    intervals, pass@k, quantiles, histograms, paired tests, pure
`tally`    sums over rows: verdicts by grader, usage, agreement of judges; notices about what a score does not show
`benchmark` the numbers of a benchmark as lm-eval computes them
`trials`   the trials of a run with their verdicts by the present thresholds, many at a time
`trial_table` every trial as a row, for filters, sorting and counts
`metrics`  results.json and metrics.json

What a command prints:
`preview`  before a run: the plan, the first prompt, and an estimate of tokens, dollars and batches
`outcome`  how a run ended, or why it stopped, and what failed in it
`table`    tables of scores, and the lines below them
`suite`    runs of a suite side by side, and which differ from the best
`transcript` a run and its trials in the terminal, chosen by status, grader or sample

Reading a run back:
`run_view` a run read back: rows × trials × verdicts
`chat`     messages with their tool calls and the calls' results
`timeline` a trial turn by turn: messages, files, checkpoints, verdicts, failed attempts
`file_changes` the files of a workspace after a turn, and what changed in them
`trial_counts` trials counted: checkpoint funnel, distributions, activity, numbers so far
`overview` a run as numbers for a page

Comparing runs:
`compare`  finished runs compared metric by metric
`pairs`    compared runs sample by sample
`alignment` two conversations side by side
`pairwise` win rates and ratings of runs judged against each other, pure
`gate`     whether a run may pass, pure

Leaving with files:
`result`   a run as `holdfast.evaluate` returns it
`tables`   rows and columns of trials, transcripts as JSON lines
`exports`  exports of a run while it is in progress and when it has ended; `exports.json` records how each went
"""
