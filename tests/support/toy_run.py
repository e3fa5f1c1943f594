"""What tests of the toy engine's process share."""

import asyncio
import sys
from collections.abc import Callable

COMMAND = (sys.executable, "-m", "support.toy_process")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(90):
        while not condition():
            await asyncio.sleep(0.02)
