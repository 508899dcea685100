"""The loop of turns between a user and a target.

`turns`           the user's messages in their order, and what was said
`simulated_user`  a simulated user
"""
