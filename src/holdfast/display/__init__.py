"""Displays of a run in progress: rich, plain, json or none; and tables for terminals and notebooks."""
