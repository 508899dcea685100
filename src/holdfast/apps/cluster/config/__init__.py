"""From configuration files and a profile to a checked `Launch`. Only reads files.

`compile`      `compile_launch`: from files to a `Launch`
`launch`       the `Launch` itself, and the task files that jobs get
`executor`     executors by name
`compose`      merges `defaults:` lists, the command line and the profile; an eval file is a launch of one task
`tree`         values that remember where they were written; resolves `${…}` and `???`, renders the result as YAML
`schema`       what a configuration may contain, one model per block, with marks on keys without effect
`profiles`     `env.toml`: where to run
`variables`    environment variables and API keys of a job, by name; values are never written down
`servers`      model servers: their commands, and how they share nodes and GPUs
`tasks`        eval files with their overrides; keys of earlier launchers, translated
`no_effect`    finds keys without effect, each with the reason
"""
