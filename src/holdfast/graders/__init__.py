"""Graders: one module per kind, or per family of kinds.

`types`        Case, Verdict, and the base classes of graders
`build`        the graders of an eval: their places, identities and construction
`text`         exact, text
`choice`       choice
`number`       number
`expected`     expected values, rendered for a row and shown in feedback
`likelihood`   likelihood
`extract`      extract
`lm_eval`      lm_eval
`ifeval`       ifeval
`ifeval_checks` the instructions of IFEval, and `ifeval_text`, which counts sentences and words and recognizes languages
`similarity`   similarity
`text_metrics` bleu, chrf, rouge, char_f1, wer, cer
`json_schema`  json_schema
`maths`        math, and `maths_worker`, its child process
`python`       a user's function
`judge`        prompt: a judge model
`judge_model`  requests to a judge
`votes`        the combined verdict of several judges
`replies`      verdicts read from a judge's reply
`trigger`      trigger
`tool_calls`   the tool calls of a conversation, read from its messages
`tool_arguments` tests of the arguments of calls
`tool_graders` behavior, action_sequence, skill_invocation, tool_calls, tool_constraint
`files`        file, diff
`programs`     program, code
`sandbox`      runs programs of graders, with restrictions
`assertions`   evaluates the assertions of `code` in child processes
`guard`        graders of plug-ins, which are not trusted
`slow_checks`  patterns and comparisons that could take forever, and `slow_worker`, their child process
`pool`         child processes that are killed when they take too long, and `worker_loop`, their side of the protocol
"""
