"""Programs of evals, each in a place of its own, so that whatever a program starts ends with it, whoever is killed.

`program`      starts programs and waits for the end of all their processes
`keeper`       a helper process that starts them and ends their processes, and `confine`, further restrictions
`survivors`    finds and ends processes that an earlier process of Holdfast left in a workspace
`cores`        the number of cores that this process may use, by its affinity and its control group
"""
