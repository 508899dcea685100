"""`holdfast init`: a small working eval to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from holdfast.display.terminal import echo
from holdfast.errors import UsageError
from holdfast.spec.schema import SCHEMA_VERSION

_EVAL: Final = """\
# A first eval. Run it, change it, run it again:   holdfast eval {name}
schemaVersion: "{version}"
name: first-steps
dataset:
  path: questions.jsonl          # one JSON object per line; its fields are the variables of the prompt
target:
  model: local/smollm2-135m      # runs on this machine; for a server: your model's name, and its base_url
  # base_url: http://127.0.0.1:8000/v1
  params: {{temperature: 0, max_tokens: 32}}
system: Answer with one word.
prompt: "{{{{ question }}}}"
graders:
  - name: correct
    type: text
    contains: "{{{{ answer }}}}"     # ignores case
"""

_QUESTIONS: Final = """\
{"id": "france", "question": "What is the capital of France?", "answer": "Paris"}
{"id": "sky", "question": "What colour is a clear sky at noon?", "answer": "blue"}
{"id": "week", "question": "Which day comes after Monday?", "answer": "Tuesday"}
{"id": "opposite", "question": "What is the opposite of hot?", "answer": "cold"}
{"id": "legs", "question": "How many legs does a spider have? Answer with a digit.", "answer": "8"}
"""


@click.command("init")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".")
def command(folder: Path) -> int:
    """Write eval.yaml and questions.jsonl into FOLDER [default: the current folder]. Overwrites nothing."""
    path = folder / "eval.yaml"
    files = {path: _EVAL.format(name=path, version=SCHEMA_VERSION), folder / "questions.jsonl": _QUESTIONS}
    for file in files:
        if file.exists():
            raise UsageError(f"{file} is already there", remedy="Choose another folder: holdfast init FOLDER")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            file.write_text(text, encoding="utf-8")
            echo(f"wrote {file}")
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror}") from error
    echo(f"Run it with:  holdfast eval {path}")
    return 0
