"""`millpond demo`: a queue at work in a SQLite file, through the seam and nothing else."""

import asyncio
import errno
import random
import shutil
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from millpond.cli.app import app
from millpond.cli.look import list_, stats
from millpond.control import Control
from millpond.message import Claim, Message, State
from millpond.outcome import Ack, Outcome, Raised, Reject, RejectMessage, Returned, decide
from millpond.retry import Retry
from millpond.transport import Store
from millpond.transports import connect

FOLDER = "millpond-demo"
QUEUE = "orders"
_BATCH = 200
_RETRY = Retry(initial=0.2, multiplier=2, maximum=1, attempts=3)


@app.command("demo")
def demo(
    orders: Annotated[int, typer.Option(min=1, max=100_000, help="How many messages to publish.")] = 3000,
) -> None:
    """Publish, claim and settle some thousand orders in the folder millpond-demo, which is made anew."""
    asyncio.run(_demo(orders))


async def _demo(orders: int) -> None:
    url = _fresh_folder()
    transport = await connect(url)
    try:
        control = Control(transport)
        store = control.store
        print(f"A queue in {url.removeprefix('sqlite:///')}: plain tables in a SQLite file.\n")
        await store.publish([_order(sku) for sku in range(1, orders + 1)])
        print(f"Published {orders:,} orders, all in one transaction.")
        handled = await _work(store, orders)
        print(f"{handled:,} deliveries for {orders:,} orders: some were nacked and came back.\n")
        await stats(control)
        failed = await control.messages(QUEUE, states=[State.FAILED], limit=1)
        if failed:
            print("\nWhat failed is kept, with its reason and its last error:\n")
            await list_(control, QUEUE, state=[State.FAILED], limit=5)
            (again,) = (await control.retry([failed[0].id])).published
            await store.settle([Ack(claim.receipt) for claim in await store.claim([QUEUE], limit=1)])
            print(f"\nThe carrier is back: the first of them was retried, as {again}, and came through:\n")
            await stats(control)
    finally:
        await transport.close()
    print(f"""
What to try next:

  export MILLPOND_URL={url}
  millpond list {QUEUE} --state failed
  millpond retry --queue {QUEUE}
  millpond publish {QUEUE} '{{"sku": 7}}'
  millpond stats --json
""")


def _fresh_folder() -> str:
    folder = Path(FOLDER)
    # Only a folder that an earlier demo made is cleared.
    if folder.exists() and any(file.name.split(".")[0] != QUEUE for file in folder.iterdir()):
        raise FileExistsError(errno.EEXIST, "holds files that are not the demo's; move it away first", FOLDER)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return f"sqlite:///{FOLDER}/{QUEUE}.db"


def _order(sku: int) -> Message:
    return Message(
        queue=QUEUE,
        payload=msgspec.json.encode({"sku": sku, "quantity": sku % 5 + 1}),
        key=f"customer-{sku % 100}",
        priority=10 if sku % 50 == 0 else 50,
    )


def _ship(claim: Claim, luck: random.Random) -> None:
    """The handler: carriers do not always answer, one is down for now, and a few orders cannot be shipped at all."""
    sku = msgspec.json.decode(claim.message.payload)["sku"]
    if sku % 1000 == 13:
        raise RejectMessage(f"sku {sku} was discontinued")
    if sku % 500 == 7 or luck.random() < 0.05:
        raise TimeoutError("the carrier does not answer")


async def _work(store: Store, orders: int) -> int:
    """Claim and settle until the queue is empty; returns the number of deliveries."""
    luck = random.Random(7)
    handled = settled = 0
    with _progress() as progress:
        bar = progress.add_task("claim, ship, settle", total=orders)
        while settled < orders:
            claims = await store.claim([QUEUE], limit=_BATCH, lease=30)
            if not claims:  # the rest waits for its next attempt
                await store.wait([QUEUE], timeout=1)
                continue
            outcomes = [_outcome(claim, luck) for claim in claims]
            refused = await store.settle(outcomes)
            assert not refused, "nobody else works on this queue"
            handled += len(claims)
            settled += sum(isinstance(outcome, Ack | Reject) for outcome in outcomes)
            progress.update(bar, completed=settled)
    return handled


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def _outcome(claim: Claim, luck: random.Random) -> Outcome:
    try:
        _ship(claim, luck)
    except Exception as e:
        return decide(claim, Raised(e), retry=_RETRY)
    return decide(claim, Returned(), retry=_RETRY)
