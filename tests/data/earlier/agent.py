"""An agent that remembers nothing, calls a tool, and notes what it was asked; it dies where it is told to."""

import os
from pathlib import Path


def note(text):
    with (Path(__file__).parent / "calls.txt").open("a") as file:
        file.write(f"{text}\n")


def price(thing: str) -> str:
    """What something costs."""
    note(f"price {thing}")
    return f"{thing}: {len(thing)}"


def reply(prompt, context):
    if prompt == os.environ.get("DIE_AT"):
        os.kill(os.getpid(), 9)
    note(prompt)
    return prompt.upper()


def buy(prompt, context):
    found = context.tool("price", {"thing": prompt})
    return reply(f"{prompt} {found}", context)


def polite(output):
    return 1.0 if output.isupper() else 0.0
