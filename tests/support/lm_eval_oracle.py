"""Run as a program: evaluate tasks with lm-eval itself, on the server and the data of a test.

Takes one JSON object on standard input: `base_url`, `hub`, `tasks` as [[task, shots, gen_kwargs or null], …], `limit`,
`include`, a folder of further tasks, and optionally `max_length`. Prints lm-eval's results and samples by task.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from functools import cache
from pathlib import Path


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.read())
    logging.disable(logging.CRITICAL)
    import datasets
    import lm_eval
    from lm_eval import utils
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    original = datasets.load_dataset
    hub = Path(request["hub"])
    datasets.load_dataset = cache(lambda path, name=None, **options: original(str(hub / path), name, **options))
    # Most of its time goes into reading a README.md for each configuration, and compiling a template for each field.
    datasets.load.DatasetCard.load = cache(datasets.load.DatasetCard.load)
    utils.env.from_string = cache(utils.env.from_string)
    base = Path(lm_eval.__file__).parent / "tasks"
    folders = [
        base / name for name in ("arc", "gsm8k", "hellaswag", "mmlu/default", "openbookqa", "wikitext", "winogrande")
    ]
    manager = TaskManager(include_defaults=False, include_path=[*map(str, folders), request["include"]])
    client = LocalCompletionsAPI(
        base_url=f"{request['base_url']}/completions",
        model="m",
        tokenizer_backend="remote",
        max_length=request.get("max_length", 100_000),
        num_concurrent=2,
    )
    by_task = {}
    for task, shots, options in request["tasks"]:
        results = lm_eval.simple_evaluate(
            model=client,
            tasks=[task],
            num_fewshot=shots,
            gen_kwargs=options,
            limit=request["limit"],
            task_manager=manager,
            bootstrap_iters=0,
        )
        samples = {
            name: [
                {key: sample[key] for key in ("doc_id", "filter", "arguments", "resps", *sample["metrics"])}
                for sample in listed
            ]
            for name, listed in results["samples"].items()
        }
        by_task[task] = {"results": results["results"], "samples": samples}
    json.dump(by_task, answers, default=str)
    answers.close()


if __name__ == "__main__":
    main()
