"""Contains the programs of evals: whatever a program starts ends with the program, whichever process is killed.

`program`      starts programs and waits for the end of all their processes
`keeper`       a helper process that starts programs and ends their processes
`confine`      further restrictions on a program: namespaces, read-only mounts, Landlock, limits
`survivors`    finds and ends processes that an earlier process of Holdfast left in a workspace
"""
