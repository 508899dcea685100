"""Numbers from verdicts.

`stats`    intervals and pass@k, pure
`tally`    what is counted on the way through a run
`breakdown` sums over all rows, and over those with each value of a field
`benchmark` the numbers of a benchmark as lm-eval computes them, pure
`notices`  what a score does not show, in words: partial answers, skipped outputs, reasoning in replies
`failures` why trials and grades are missing, and what was retried
`example`  a trial that failed, for the end of a command
`summary`  the lines below the table
`waiting`  batches that are under way, in words
`outcome`  how a run ended, or why it stopped
`agreement` how far several judges agree, pure
`verdicts` verdicts on an output by the present thresholds
`trials`   the trials of a run with their verdicts, many at a time
`trial_facts` facts of a trial, written into its row of a table
`trial_columns` the trials of a large run as columns, written with its report
`metrics`  results.json and metrics.json
`line_places` where the lines of each trial are in its journals
`run_view` a run read back: rows × trials × verdicts
`chat`     messages with their tool calls and the calls' results
`checkpoints` verdicts on a trial: at its checkpoints and at its end
`timeline` a trial turn by turn: messages, tool calls with results, checkpoints, failed attempts
`file_changes` files of a workspace after a turn, and what became of them
`histogram` distributions in bins with round bounds, pure
`so_far`       numbers of a run that is not finished
`trial_counts` trials counted: checkpoint funnel, distributions, activity
`overview` a run as numbers for a page
`selection` trials by status and grader, samples by id
`transcript` a trial in the terminal
`estimate` about what a run takes: tokens, dollars, batches
`preview`  the first prompt and the estimate, before a run
`table`    what a person sees at the end
`breakdown_table` its tables by field, and of a benchmark's tasks and groups
`paired`   two runs on the same samples, pure
`compare`  finished runs read back, and what comparing them says
`pairs`    compared runs sample by sample
`alignment` two conversations side by side
`suite`    runs of a suite side by side, and which differ from the best
`suite_grid` runs by eval and target, for pages
`pairwise` win rates and ratings of runs judged against each other, pure
`gate`     whether a run may pass, pure
"""
