"""Checks: one module per kind of grader.

`types`   Case, Verdict, Grader
`checks`  exact, text, choice, number: answered at once
`schema`  json_schema
`python`  a user's function
`prompt`  a judge model
`build`   from what the eval file says to the grader, and to what of it belongs into the key
"""
