"""The eval file: read, checked as a whole, and turned into an `Eval`.

`document`       YAML with positions
`schema`         what users may write, one model per block
`grader_schema`  the same for graders, one model per kind: those of what was said, and what all have
`text_metric_schema` text metrics
`tool_grader_schema` graders of tool calls
`file_grader_schema` graders of files, and programs on them
`expected`       what a row expects: one text, or any of several
`numbers`        numbers as people and models write them
`regex`          regular expressions as users write them, and the engine that matches each
`slow`           work that is done in other processes because it could take long
`re2_syntax`     Python's regular expressions in the syntax of RE2
`vacuous`        checks that can hardly fail
`load_targets`   the target
`load_exports`   exporters, and the options of an export
`load_graders`   graders, and the models that judge and play the user
`findings`       collects problems and notices, each with its place
`validation`     checks blocks by their models, and words what is wrong
`plugins`        extension points: built-in kinds, and entry points of installed packages
`origin`         the eval file and the place in it that a grader or a target comes from
`overrides`      `a.b=value` from the command line
`legacy`         versions of the file, and how files from before there were any spelt things
`rewrite`        changes of a file that leave the rest of its text as it is
`migrate`        a file brought up to date, in place and with a backup
`load`           all of it, with every problem named by file and line
`template`       sandboxed Jinja2
`fingerprint`    fingerprints of code, from reading it
`selection`      rows asked for by id and tag
`redact`         removes secrets from what is shown and kept
"""
