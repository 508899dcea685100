"""The eval file: read, checked as a whole, and turned into an `Eval`.

`load`           loads an eval file, and reports every problem with its file and line
`document`       YAML with positions
`validation`     validates blocks by their schemas, and words the problems
`findings`       collects problems and notices, each with its place
`overrides`      `a.b=value` from the command line
`origin`         the eval file and the place in it that a grader or a target comes from
`plugins`        extension points: built-in kinds, and entry points of installed packages
`load_targets`   the target, and the registry of targets
`load_graders`   graders, judges and the simulated user, and the registry of graders
`load_likelihood` checks of evals with continuations
`formats`        evals of any format, from files and folders, and tasks by name
`suite`          suites: several evals and targets, from a suite file or the command line
`load_exports`   exporters, and the options of an export
`schema`         the schemas of an eval file's top, its dataset and its limits, and the base of all schemas
`trial_limits`   the limits of one trial: their defaults, whether they score, and their part of the key
`conversation_schema` schemas of messages, the simulated user and checkpoints
`agent_schema`   schemas of tools and workspaces
`model_schema`   schemas of prices, batches, and reasoning in replies
`gate_schema`    the schema of the conditions that a finished run must meet
`hook_schema`    schemas of programs around a run and its trials
`benchmark_schema` the schema of a benchmark by name
`export_schema`  the schemas of exports
`target_schema`  the base schema of targets, and that of models
`http_target_schema` the schema of HTTP targets
`code_target_schema` schemas of targets that are functions, programs and installed agents
`grader_texts`   the texts of graders: templates over the row, and those that must not look like one
`grader_schema`  the base schemas of graders
`text_grader_schema` schemas of graders that compare texts
`number_grader_schema` the schema of the grader of numbers
`likelihood_grader_schema` the schema of the grader of likelihoods
`judge_schema`   the schema of judges
`content_grader_schema` schemas of graders that take an answer as more than its words
`benchmark_grader_schema` schemas of graders of benchmarks
`text_metric_schema` schemas of text metrics
`tool_grader_schema` schemas of graders of tool calls
`file_grader_schema` schemas of graders of files and by programs
`providers`      where models are found by the prefix of their name
`env_file`       `.env` files
`vacuous`        warnings about checks that can hardly fail
`expected`       expected values of a row: one text, or alternatives
`numbers`        numbers as people and models write them
`regex`          regular expressions, and the engine that matches each
`re2_syntax`     translates Python's regular expressions to RE2
`slow`           work that is done in other processes because it could take forever
`template`       templates and expressions, and `jinja`, those that take Jinja2 in its sandbox
`benchmark_tasks` tasks, groups and metrics of a benchmark
`selection`      rows selected by id and tag
`named_inputs`   files and environment variables that the eval file names for its code
`row_fields`     the fields of a row that a target and a grader see
`fingerprint`    fingerprints of code, from reading it
`code_files`     collects the files that fingerprints are made of
`learning`       what only running tells, asked in runs and remembered for plans
`redact`         removes secrets before an eval is shown or stored
`legacy`         versions of the file, and earlier spellings
`rewrite`        changes a file and preserves the rest of its text
`migrate`        brings a file up to date, in place and with a backup
"""
