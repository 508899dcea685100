"""The target inside the guest: it answers after a moment, without a network."""

import asyncio
import zlib


async def reply(prompt: str) -> str:
    """The question itself."""
    await asyncio.sleep(0.005 + zlib.crc32(prompt.encode()) % 20 / 1000)
    return prompt
