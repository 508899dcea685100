"""waza's eval files, translated into documents of Holdfast, and its results.json.

`format`     recognizes waza's eval files
`read`       an eval.yaml as a whole
`config`     its `config` block, and the defaults of `.waza.yaml`
`tasks`      task files and CSV rows as samples
`files`      fixtures, skills and instructions
`repos`      commits of git repositories, as files of the workspace
`target`     requirements on the target: tools, working directory, environment
`commands`   mocked programs
`mocks`      mocked MCP servers as scripted tools
`graders`    graders and checkpoints, the older kinds too
`mock`       the mock executor as a target
`hooks`      programs around the run and its trials
`triggers`   `trigger_tests.yaml`
`gotext`     Go's templates, as far as evals use them
`export`     a run as waza's results.json
`statistics` the numbers in it
`findings`   problems and notices, with their places
"""
