"""The conversation between a user and a target.

`turns`           the user's messages from the eval file, and the conversation as it grows
`simulated_user`  the simulated user, a model or a function
"""
