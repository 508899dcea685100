"""Graders: one module per kind, or per family of kinds, each with the schema of its block.

`types`        Case, Verdict, and the base classes of graders
`build`        the graders of an eval: their places, identities and construction
`guard`        the grader of a plug-in, which is not trusted
`expected`     expected values of a row, as graders compare them and feedback shows them
`text`         exact, text, extract
`choice`       choice
`number`       number, and how numbers are read
`likelihood`   likelihood
`text_metrics` similarity, bleu, chrf, rouge, char_f1, wer, cer
`json_schema`  json_schema
`maths`        math
`ifeval`       ifeval
`lm_eval`      lm_eval
`python`       a user's function
`judge`        prompt: a judge model, and requests to it
`replies`      verdicts read from a judge's reply
`trigger`      trigger
`tool_calls`   the tool calls of an output, and tests of them
`tool_graders` behavior, action_sequence, skill_invocation, tool_calls, tool_constraint
`files`        file, diff
`programs`     program, code, and the sandbox that they run in
`assertions`   evaluates the assertions of `code` in child processes
`pool`         processes for work that could take forever, and `worker`, which runs in them
"""
