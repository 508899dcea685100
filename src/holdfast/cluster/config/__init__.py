"""From configuration files and a profile to a checked `Launch`. Only reads files.

`compile`      `compile_launch`: from files to a `Launch`
`launch`       the `Launch` itself, and the task files that jobs get
`executor`     executors by name
`compose`      merges `defaults:` lists, the command line and the profile; an eval file alone is a launch of one task
`interpolate`  `${…}` and `???`
`provenance`   values that remember where they were written
`schema`       what a configuration may contain, one model per block
`profiles`     `env.toml`: where to run
`walltime`     Slurm's notation for times
`variables`    environment variables and API keys of a job, by name; values are never written down
`servers`      model servers: their commands, and how they share nodes and GPUs
`tasks`        eval files with their overrides
`legacy`       keys of earlier launchers (also in `adapter_config`), translated
`marks`        marks on schema fields: keys without effect
`no_effect`    finds keys without effect, each with the reason
`render`       the compiled configuration as text
"""
