"""Deciding what to do, before anything is done: keys, and the plan made from them. Pure functions."""
