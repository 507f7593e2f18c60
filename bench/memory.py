"""Growth of a process while it drains many messages: `python -m bench.memory COUNT BATCH < url`."""

import asyncio
import os
import sys

from bench.store_side import open_store


def resident() -> float:
    """Resident memory of this process in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def main(url: str, count: int, batch: int) -> float:
    side = await open_store(url)
    before = peak = resident()
    part = max(batch, count // 100 // batch * batch)
    for _ in range(count // part):
        await side.drain(part, batch)
        peak = max(peak, resident())
    await side.close()
    return peak - before


if __name__ == "__main__":
    print(asyncio.run(main(sys.stdin.read().strip(), int(sys.argv[1]), int(sys.argv[2]))))
