"""The yardstick: the shortest aiohttp loop that asks for every row and writes one line per reply, without sync.

    python bench/bare.py BASE_URL DATASET OUTPUT asyncio|uvloop

64 workers, `session.post(json=…)`, `await response.json()`. No keys, retries, time-outs, grades or checksums.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import aiohttp

CONCURRENCY = 64


async def main(base_url: str, dataset: Path, output: Path) -> None:
    """Ask for every row of the dataset."""
    with dataset.open() as rows, output.open("w") as replies:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENCY)) as session:

            async def work() -> None:
                for line in rows:
                    row = json.loads(line)
                    body = {"model": "bench", "messages": [{"role": "user", "content": row["question"]}]}
                    async with session.post(f"{base_url}/v1/chat/completions", json=body) as response:
                        reply = await response.json()
                    answer = reply["choices"][0]["message"]["content"]
                    replies.write(json.dumps({"id": row["id"], "output": answer}) + "\n")

            await asyncio.gather(*(work() for _ in range(CONCURRENCY)))


if __name__ == "__main__":
    run = asyncio.run
    if sys.argv[4] == "uvloop":
        from uvloop import run
    run(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
