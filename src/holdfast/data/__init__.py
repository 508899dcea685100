"""Datasets: rows from files, turned into samples one at a time.

`readers`   one generator per file format
`messages`  the messages of a row, and the files in them
`dataset`   selection (where, shuffle, offset, limit), ids and digests
`columns`   a value for each row, and the values by which results are broken down
`panels`    the graders that apply to each row
`checks`    templates, expressions and questions of the eval, checked against rows
`survey`    the pass over all rows before a run, cached for large datasets
`matching`  the rows that two versions of a dataset have in common
"""
