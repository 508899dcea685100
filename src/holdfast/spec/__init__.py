"""The eval file: read, checked as a whole, and turned into an `Eval`.

`load`           loads an eval file, and reports every problem with its file and line
`eval`           an eval, a place in one, and the fields of a row that targets and graders see
`checks`         checks of an eval as a whole, and warnings about graders that can hardly fail
`formats`        evals of any format, from files and folders, and tasks by name
`suite`          suites: several evals and targets, from a suite file or the command line

`document`       YAML with positions
`overrides`      `a.b=value` from the command line
`validation`     validates blocks by their schemas, and collects problems and notices
`quantities`     durations and sizes as people write them
`schema`         the base of all schemas, and the types of their values
`eval_schema`    schemas of the eval file, without its target, graders and exports
`target_schema`  schemas of targets and their tools, and the registry of targets
`exports`        schemas of exports, and the registry of exporters
`load_graders`   graders, their templates, the simulated user's model, and the registry of graders
`grader_schema`  the base schemas of graders, and the schema of judges
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
