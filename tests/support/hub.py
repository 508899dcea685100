"""A small mirror of the Hugging Face hub: datasets in the layout of well-known ones, all rows made up here.

The rows have the oddities of the originals: choices that are numbered instead of lettered, three or five choices,
markup in HellaSwag's texts, commas in GSM8K's numbers, blanks at the ends of questions.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from holdfast.plugins.benchmarks.names import OVERLAY

if TYPE_CHECKING:
    from pathlib import Path

SUBJECTS = sorted(path.stem for path in (OVERLAY / "mmlu_str").glob("[a-z]*.yaml"))
_THINGS = (
    "kettle",
    "ladder",
    "violin",
    "lantern",
    "compass",
    "anchor",
    "basket",
    "feather",
    "hammer",
    "mirror",
    "café",
)
_PLACES = ("in the harbour", "below the mill", "on a shelf", "under the bridge", "near the orchard")


def _thing(number: int) -> str:
    return _THINGS[number % len(_THINGS)]


def _place(number: int) -> str:
    return _PLACES[number % len(_PLACES)]


def arc(number: int) -> dict[str, Any]:
    count = (4, 3, 5)[number % 3]
    labels = list("12345" if number % 4 == 1 else "ABCDE")[:count]
    texts = [f"the {_thing(number + place)} {_place(number * place)}" for place in range(count)]
    return {
        "id": f"Q{number}",
        "question": f"Which object number {number} is kept {_place(number)}?",
        "choices": {"text": texts, "label": labels},
        "answerKey": labels[number % count],
    }


def openbookqa(number: int) -> dict[str, Any]:
    texts = [f"{_thing(number + place)}s {_place(place)}" for place in range(4)]
    return {
        "id": f"{number}",
        "question_stem": f"A {_thing(number)} that is wet is found with",
        "choices": {"text": texts, "label": list("ABCD")},
        "answerKey": "ABCD"[number % 4],
    }


def hellaswag(number: int) -> dict[str, Any]:
    ending = [f"puts the {_thing(number + place)} {_place(number + place)}." for place in range(4)]
    start = f"[header] How to carry a {_thing(number)} [title] Lift it.  A woman walks"
    return {
        "ind": number,
        "activity_label": f"Carrying a {_thing(number)}",
        "ctx_a": start,
        "ctx_b": "she" if number % 2 else "",
        "ctx": start,
        "endings": ending,
        "source_id": f"made~{number}",
        "split": "val",
        "split_type": "indomain",
        "label": str(number * 7 % 4),
    }


def winogrande(number: int) -> dict[str, Any]:
    return {
        "sentence": f"Ida lent Omar the {_thing(number)} because _ had left it {_place(number)}.",
        "option1": "Ida",
        "option2": "Omar",
        "answer": str(number % 2 + 1),
    }


def gsm8k(number: int) -> dict[str, Any]:
    price, count = 1250 + number, number + 2
    total = price * count
    return {
        "question": f"A {_thing(number)} costs ${price}. How much do {count} of them cost?",
        "answer": f"They cost {count} * {price} = <<{count}*{price}={total}>>{total}.\n#### {total:,}",
    }


def mmlu(subject: str, number: int) -> dict[str, Any]:
    return {
        "question": f" In {subject.replace('_', ' ')}, what is a {_thing(number)} for? ",
        "subject": subject,
        "choices": [f"To be kept {_place(number + place)}" for place in range(4)],
        "answer": (len(subject) + number) % 4,
    }


def wikitext(number: int) -> dict[str, Any]:
    sentence = f" The {_thing(number)} , which weighs {number} @.@ 5 kg , is {_place(number)} . \n"
    return {"page": f" = {_thing(number).title()} = \n \n" + sentence * (number * 4) + " It 's old . \n"}


def write_hub(folder: Path) -> Path:
    """Write the datasets, and return the folder of the mirror."""
    write_dataset(folder / "allenai/ai2_arc", {"ARC-Challenge": {"train": _rows(arc, 30, 7), "test": _rows(arc, 9)}})
    write_dataset(
        folder / "allenai/openbookqa", {"main": {"train": _rows(openbookqa, 8, 3), "test": _rows(openbookqa, 9)}}
    )
    write_dataset(
        folder / "Rowan/hellaswag", {"default": {"train": _rows(hellaswag, 14, 50), "validation": _rows(hellaswag, 6)}}
    )
    write_dataset(
        folder / "allenai/winogrande",
        {"winogrande_xl": {"train": _rows(winogrande, 12, 40), "validation": _rows(winogrande, 9)}},
    )
    write_dataset(folder / "openai/gsm8k", {"main": {"train": _rows(gsm8k, 12, 60), "test": _rows(gsm8k, 8)}})
    write_dataset(
        folder / "cais/mmlu",
        {
            subject: {
                "dev": [mmlu(subject, number) for number in range(5)],
                "test": [mmlu(subject, number) for number in range(5, 8)],
            }
            for subject in SUBJECTS
        },
    )
    write_dataset(
        folder / "EleutherAI/wikitext_document_level",
        {"wikitext-2-raw-v1": {split: _rows(wikitext, 6) for split in ("train", "validation", "test")}},
    )
    return folder


def _rows(make: Any, count: int, first: int = 0) -> list[dict[str, Any]]:
    return [make(number) for number in range(first, first + count)]


def write_dataset(folder: Path, configs: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Write a dataset: its configurations, their splits, and a README.md that lists these as the hub's do."""
    described = []
    for config, splits in configs.items():
        for split, rows in splits.items():
            path = folder / config / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = [{"split": split, "path": f"{config}/{split}.jsonl"} for split in splits]
        described.append({"config_name": config, "data_files": files})
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(described)}\n---\n")
