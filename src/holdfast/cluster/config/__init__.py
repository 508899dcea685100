"""From configuration files and a profile to a checked `Launch`. Only reads files.

`compile`      `compile_launch`: from files to a `Launch`
`launch`       the `Launch` itself
`options`      what a command says about the runs
`compose`      merges `defaults:` lists, the command line and the profile
`bare`         an eval file alone, as a configuration with one task
`interpolate`  `${…}` and `???`
`provenance`   values that remember where they were written
`schema`       what a configuration may contain, one model per block
`profiles`     `env.toml`: where to run
`walltime`     Slurm's notation for times
`variables`    environment variables of a job, by name; values are never written down
`api_keys`     API keys of hosted models, which have to be passed on
`servers`      the model servers that are known, and their commands
`auxiliary`    servers beside that of the model
`nodes`        numbers of nodes and GPUs, and how servers share them
`tasks`        eval files with their overrides
`legacy`       keys of earlier launchers, translated
`adapter`      what `adapter_config` means here
`no_effect`    keys without effect, each with the reason
`render`       the compiled configuration as text
"""
