"""The eval file: read, checked as a whole, and turned into an `Eval`.

`load`           loads an eval file, and reports every problem with its file and line
`eval`           an eval, a place in one, and the fields of a row that targets and graders see
`checks`         checks of an eval as a whole, and warnings about graders that can hardly fail
`formats`        evals of any format, from files and folders, and tasks by name
`suite`          suites: several evals and targets, from a suite file or the command line

`document`       YAML with positions
`overrides`      `a.b=value` from the command line
`validation`     validates blocks by their schemas, and collects problems and notices
`schema`         the base of all schemas, and the types of their values
`eval_schema`    schemas of the eval file, without its target, graders and exports
`target_schema`  schemas of targets and their tools, and the registry of targets
`exports`        schemas of exports, and the registry of exporters
`load_graders`   graders, judges and the simulated user, and the registry of graders
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
`expected`       expected values of a row: one text, or alternatives
`numbers`        numbers as people and models write them
`plugins`        extension points: built-in kinds, and entry points of installed packages

`template`       templates and expressions over the row's fields
`regex`          regular expressions, and the engine that matches each
`slow`           work that other processes do because it could take forever
`providers`      finds a model's provider by the prefix of its name
`trial_limits`   the limits of one trial: their defaults, whether they score, and their part of the key
`benchmark_tasks` tasks, groups and metrics of a benchmark
`fingerprint`    fingerprints of code, from reading it
`named_inputs`   files and environment variables that the eval file names for its code
`redact`         removes secrets before anything is shown or stored
"""
