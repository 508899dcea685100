"""The loop of turns between a user and a target.

`talk`       the user's messages in their order, and what was said
`responder`  a simulated user
"""
