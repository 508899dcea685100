"""The eval file: read, checked as a whole, and turned into an `Eval`.

`document`       YAML with positions
`fields`         what users may write, one model per block
`grader_fields`  the same for graders, one model per kind: those of what was said, and what all have
`overlap_fields` text metrics
`tool_fields`    graders of tool calls
`file_fields`    graders of files, and programs on them
`expected`       what a row expects: one text, or any of several
`numbers`        numbers as people and models write them
`regex`          regular expressions as users write them, and the engine that matches each
`slow`           work that is done in other processes because it could take long
`re2_syntax`     Python's regular expressions in the syntax of RE2
`vacuous`        checks that can hardly fail
`grader_load`    graders, and the models that judge and play the user
`reading`        blocks checked by their models, with what is wrong in words
`overrides`      `a.b=value` from the command line
`earlier`        versions of the file, and how files from before there were any spelt things
`rewriting`      changes of a file that leave the rest of its text as it is
`migrate`        a file brought up to date, in place and with a backup
`load`           all of it, with every problem named by file and line
`template`       sandboxed Jinja2
`source`         fingerprints of code, from reading it
`selection`      rows asked for by id and tag
`secrets`        what may be shown and kept of an eval
"""
