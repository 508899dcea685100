"""The loop of turns between a user and a target."""
