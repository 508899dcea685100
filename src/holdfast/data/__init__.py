"""Datasets: rows from files, turned into samples one at a time.

`readers`  one generator per file format
`dataset`  selection (where, shuffle, offset, limit), ids, digests, and the survey made before a run
`survey_cache`  stores surveys of large datasets
`messages` the messages of a row, and the files in them
`media`    the kind of a file by its first bytes
`panels`   the graders that apply to each row
`grouping` the values by which results are broken down
"""
