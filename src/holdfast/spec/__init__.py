"""The eval file: read, checked as a whole, and turned into an `Eval`.

`load`           loads an eval file with overrides, checks it as a whole, and reports every problem by file and line
`eval`           an eval, a place in one, what targets and graders see, and the tasks of a benchmark
`formats`        evals of any format, from files and folders, and tasks by name
`suite`          suites: several evals and targets, from a suite file or the command line

`document`       YAML with positions, and durations and sizes as people write them
`schema`         the base of all schemas, the types of their values, and how blocks are validated
`eval_schema`    schemas of the eval file and its exports, and the registry of exporters
`target_schema`  schemas of targets and their tools, and the registry of targets
`load_graders`   graders, their templates, the simulated user's model, and the registry of graders
`grader_schema`  the base schemas of graders, and the schema of judges
`plugins`        extension points: built-in kinds, and entry points of installed packages

`template`       templates and expressions over the row's fields
`regex`          regular expressions, the engine that matches each, and work that could take forever
`providers`      finds a model's provider by the prefix of its name
`trial_limits`   the limits of one trial: their defaults, whether they score, and their part of the key
`fingerprint`    fingerprints of code, from reading it
`redact`         removes secrets before anything is shown or stored
"""
