"""Deciding what to do, before anything is done.

`identity` which run this is: everything that its keys are made of
`keys`     what can change a result, and nothing else
`plan`     what is finished, to grade, to run
`reuse`    what other runs have already done
`changes`  why something has to be done, in words
`history`  what other runs can lend, and what changed since the nearest
`progress` the numbers a display shows
"""
