"""Datasets: rows from files, turned into samples one at a time.

`readers`   one generator per file format
`messages`  the messages of a row, and the files in them
`dataset`   selection (where, shuffle, offset, limit), ids and digests
`columns`   a value for each row: by which results are broken down, and which graders apply
`checks`    templates, expressions and questions of the eval, checked against rows
`survey`    the pass over all rows before a run, cached for large datasets
"""
