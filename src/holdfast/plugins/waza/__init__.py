"""waza's eval files, translated into documents of Holdfast, and its results.json.

`read`       an eval.yaml as a whole
`config`     its `config` block, and the defaults of `.waza.yaml`
`tasks`      task files, CSV rows and trigger tests as samples
`files`      fixtures, skills, instructions, and commits of git repositories, as files of the workspace
`target`     requirements on the target: tools, mocked programs and MCP servers, working directory, environment
`graders`    graders and checkpoints, including the kinds of earlier versions of waza
`mock`       the mock executor as a target
`export`     a run as waza's results.json
`statistics` the numbers in it
`findings`   problems and notices, with their places
"""
