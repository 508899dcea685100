"""Checks: one module per kind of grader, or per family.

`types`        Case, Verdict, and the base classes of graders
`text`         exact, text, choice, number: answered at once
`similarity`   similarity
`text_metrics` bleu, chrf, rouge, char_f1, wer, cer
`pool`         processes that are asked what could take for ever, and killed when it does
`answering`    the other end of it, in the child
`maths`        math, asked of a pool
`mathematics_worker`  what runs in it
`elsewhere`    patterns and comparisons that could take long, asked of a pool
`slow_worker`  what runs in it
`json_schema`  json_schema
`python`       a user's function
`guard`        graders of plug-ins, which are not trusted
`judge`        a judge model
`asking`       requests to a judge
`replies`      scores read from a judge's reply
`trigger`      trigger
`tool_calls`   the tool calls of a conversation, read out of its messages
`tool_graders` behavior, action_sequence, skill_invocation, tool_calls, tool_constraint
`files`        file, diff
`programs`     program, code
`sandbox`      where programs of graders run, and what they are kept from
`confine`      what keeps them from it, in the child
`assertions`   what evaluates the assertions of `code`, in the child
`build`        the graders of an eval: their places, identities and construction
"""
