"""Numbers from verdicts.

`stats`    intervals and pass@k, pure
`tally`    what is counted on the way through a run
`metrics`  results.json and metrics.json
`table`    what a person sees at the end
"""
