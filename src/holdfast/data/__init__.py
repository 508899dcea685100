"""Datasets: rows from files, turned into samples one at a time.

`readers`  one generator per file format
`dataset`  selection (where, shuffle, offset, limit), ids, digests, and the survey made before a run
`questions` refuses rows that all ask the same
`row_checks`  templates and expressions of the eval, checked against rows
`survey_cache`  stores surveys of large datasets
`survey_update` brings the survey of changed JSON lines up to date
`survey_fit`    fits the survey of the same rows to other graders
`matching` what two versions of a dataset have in common
`messages` the messages of a row, and the files in them
`media`    the kind of a file by its first bytes
`panels`   the graders that apply to each row
`numbers`  arrays with a number for each row
`grouping` the values by which results are broken down
"""
