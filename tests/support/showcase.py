"""Runs that have something of everything that a page shows: tools, files, errors, checkpoints, a judge."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from holdfast.spec.schema import SCHEMA_VERSION
from tests.support.running import holdfast, run_dir

if TYPE_CHECKING:
    from pathlib import Path

AGENT = """\
from pathlib import Path

from holdfast import Reply

STOCK = {"tea": 3, "milk": 1}


def price(thing):
    return {"thing": thing, "price": STOCK.get(thing, 0)}


def reply(prompt, context):
    if context.sample_id == "broken":
        raise ValueError("the agent has lost its notes")
    attempts = Path(__file__).with_name(f"{context.sample_id}-{context.trial}-{context.turn}.txt")
    if context.sample_id == "tea" and context.turn == 2 and not attempts.exists():
        attempts.write_text("once")
        raise ConnectionError("the stock service hung up")
    thing = context.sample_id
    cost = context.tool(price, {"thing": thing})["price"]
    notes = context.workspace / "notes.md"
    before = notes.read_text() if notes.exists() else "# Notes\\n"
    notes.write_text(before + f"- turn {context.turn}: {thing} costs {cost}\\n")
    if context.turn == 2:
        (context.workspace / "draft.txt").unlink(missing_ok=True)
        (context.workspace / "bill.json").write_text('{"total": %d}\\n' % cost)
    call = {"id": f"call_{context.turn}", "type": "function",
            "function": {"name": "price", "arguments": '{"thing": "%s"}' % thing}}
    text = f"{thing} costs {cost}." if cost else "I do not know."
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call],
         "reasoning_content": "The customer wants a price, so I look it up."},
        {"role": "tool", "tool_call_id": call["id"], "content": '{"thing": "%s", "price": %d}' % (thing, cost)},
        {"role": "assistant", "content": text},
    ]
    return Reply(text=text, messages=messages)
"""


def agent_run(
    folder: Path, row: dict[str, str] | None = None, *, agent: tuple[str, str] = ("", ""), **keys: Any
) -> Path:
    """Run a shop assistant: three turns, two checkpoints of which the first may stop, a workspace, failed attempts.

    `tea` passes after an attempt that failed, `milk` fails at the second checkpoint, `salt` is stopped by the first,
    and `broken` has no output. `row` has further fields of every row, `agent` a text of the agent and its replacement,
    `keys` further keys of the eval.
    """
    (folder / "counter").mkdir(parents=True)
    (folder / "agent.py").write_text(AGENT.replace(*agent))
    (folder / "counter" / "draft.txt").write_text("to be written\n")
    rows = [
        {"id": name, "question": f"What does {name} cost?", "category": kind, **(row or {})}
        for name, kind in (("tea", "drinks"), ("milk", "drinks"), ("salt", "spices"), ("broken", "spices"))
    ]
    spec: dict[str, Any] = {
        "schemaVersion": SCHEMA_VERSION,
        "name": "shop",
        "target": {"python": "agent.py:reply"},
        "system": "You are the assistant of a small shop.",
        "prompt": "{{ question }}",
        "follow_ups": ["And the bill for one {{ id }}?", "Thank you. What was the price of {{ id }} again?"],
        "workspace": {"folder": "counter"},
        "checkpoints": [
            {
                "after_turn": 1,
                "on_failure": "stop",
                "graders": [{"type": "text", "name": "knows", "not_contains": ["do not know"]}],
            },
            {"after_turn": 2, "graders": [{"type": "text", "name": "dear", "contains": "costs 3"}]},
        ],
        "graders": [{"type": "text", "name": "polite", "contains": "costs"}],
        "by": ["category"],
        "limits": {"retries": 1},
        **keys,
    }
    return _run(folder, spec, rows, check=3)


def long_run(folder: Path, base_url: str, *, turns: int = 60, every: int = 10, trials: int = 2) -> Path:
    """Run conversations of many turns with a checkpoint after every tenth; every second one may end them."""
    rows = [
        {"id": f"talk-{number}", "topic": topic, "last": last, "level": level}
        for number, (topic, last, level) in enumerate(
            [
                ("rivers", turns, "easy"),
                ("clouds", turns * 35 // 60, "hard"),
                ("stones", turns * 15 // 60, "hard"),
                ("birds", turns, "easy"),
            ]
            * 6
        )
    ]
    later = "Turn %d about {{ topic }}.{%% if last < %d %%} I have forgotten everything.{%% endif %%}"
    spec: dict[str, Any] = {
        "schemaVersion": SCHEMA_VERSION,
        "name": "endurance",
        "target": {"model": "test-model", "base_url": base_url, "stream": True},
        "prompt": "Let us talk about {{ topic }} for a while.",
        "follow_ups": [later % (turn, turn) for turn in range(2, turns + 1)],
        "checkpoints": [
            {
                "after_turn": turn,
                "on_failure": "stop" if turn % (2 * every) == 0 else "continue",
                "graders": [
                    {"type": "text", "name": "remembers", "not_contains": ["forgotten everything"]},
                    {"type": "text", "name": "stays on topic", "contains": "{{ topic }}"},
                ],
            }
            for turn in range(every, turns + 1, every)
        ],
        "graders": [{"type": "text", "name": "finishes", "contains": f"Turn {turns}"}],
        "by": ["level", "topic"],
        "trials": trials,
        "prices": {"test-model": {"input": 1.0, "output": 4.0}},
    }
    return _run(folder, spec, rows)


def judged_run(folder: Path, base_url: str, judge_url: str) -> Path:
    """Run a question per row, judged by a model against a rubric, with an answer in Markdown and a failed request."""
    rows = [
        {
            "id": f"q{number}",
            "question": f"## Question {number}\n\nName *two* rivers:\n\n- one\n- two\n\n```py\nx = {number}\n```",
        }
        for number in range(40)
    ]
    spec: dict[str, Any] = {
        "schemaVersion": SCHEMA_VERSION,
        "name": "rivers",
        "target": {"model": "test-model", "base_url": base_url},
        "prompt": "{{ question }}",
        "graders": [
            {
                "type": "prompt",
                "name": "judge",
                "model": "judge-model",
                "base_url": judge_url,
                "rubric": "Names rivers.",
            },
            {"type": "text", "name": "two", "contains": "two"},
        ],
        "prices": {"test-model": {"input": 1.0, "output": 4.0}, "judge-model": {"input": 2.0, "output": 8.0}},
    }
    return _run(folder, spec, rows)


def _run(folder: Path, spec: dict[str, Any], rows: list[dict[str, Any]], *, check: int = 0) -> Path:
    """Run an eval; several of different names may be in one folder."""
    name = spec["name"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(json.dumps({**spec, "dataset": {"path": f"{name}.jsonl"}}))
    holdfast("eval", f"{name}.yaml", cwd=folder, check=check)
    return run_dir(folder, name)
