"""The conversation between a user and a target.

`script`          the user's messages from the eval file
`turns`           the conversation as it grows
`simulated_user`  the simulated user, a model or a function
"""
