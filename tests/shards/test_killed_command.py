"""`millpond shards move` is killed with SIGKILL at random moments, while publishers and workers go on."""

import asyncio
import os
import random
import sys
from collections import Counter
from pathlib import Path
from uuid import uuid4

import pytest

import millpond
from millpond import Ack, transports
from tests.conftest import FAULTS_SEED
from tests.shards.conftest import message
from tests.waiting import until


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_nothing_is_lost_or_doubled(tmp_path: Path, postgres_url: str, mariadb_url: str) -> None:
    urls = [postgres_url, mariadb_url, f"sqlite:///{tmp_path / 'c'}.db"]
    await transports.init_shards(urls, names=["a", "b", "c"], migrate=True)
    chance = random.Random(os.environ[FAULTS_SEED])
    store, other = await millpond.connect(urls), await millpond.connect(urls)
    published: list[bytes] = []
    handled: Counter[bytes] = Counter()
    stop = asyncio.Event()
    await store.publish([message(f"k{n}", f"k{n}".encode()) for n in range(3000)])
    published += [f"k{n}".encode() for n in range(3000)]

    async def publishing() -> None:
        while not stop.is_set():
            bodies = [uuid4().hex.encode() for _ in range(3)]
            await store.publish([message(body.decode(), body) for body in bodies])
            published.extend(bodies)
            await asyncio.sleep(0.01)

    async def working() -> None:
        while not stop.is_set():
            claims = await other.claim(["q"], 3)
            handled.update(claim.message.payload for claim in claims)
            await other.settle([Ack(claim.receipt) for claim in claims])
            await asyncio.sleep(0.02)

    tasks = [asyncio.ensure_future(one) for one in (publishing(), publishing(), working())]
    kills = 0
    for target in ("b", "c", "a"):
        while True:
            command = [sys.executable, "-m", "millpond", "shards", "move", "-55", "--to", target, *urls]
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
            )
            assert process.stderr is not None
            first = await process.stderr.readline()  # it has begun
            try:
                async with asyncio.timeout(chance.uniform(0.0, 0.6) if kills % 4 < 3 else 60):
                    await process.communicate()
            except TimeoutError:
                process.kill()
                await process.communicate()
                kills += 1
                continue
            assert process.returncode == 0, first
            kills += 1
            break
    stop.set()
    await asyncio.gather(*tasks)

    async def drained() -> bool:
        claims = await other.claim(["q"], 500)
        handled.update(claim.message.payload for claim in claims)
        await other.settle([Ack(claim.receipt) for claim in claims])
        return not claims

    await until(drained, "an empty pond", within=120)
    await store.close()
    await other.close()
    assert handled == Counter(published)
