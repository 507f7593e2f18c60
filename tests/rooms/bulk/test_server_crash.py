"""A server crashes between load and commit: no batch is published in part."""

from __future__ import annotations

from typing import Any

import pytest

import millpond
from millpond.errors import StagingLost
from millpond.seam.bulk import Batch
from servers import MariaDB, Postgres
from tests.rooms.bulk.test_staging import load, pending


@pytest.mark.server
@pytest.mark.parametrize("kind", [Postgres, MariaDB])
async def test_a_crash_before_the_commit(kind: type[Postgres] | type[MariaDB]) -> None:
    with kind() as server:
        url = server.create_database("pond")
        store: Any = await millpond.connect(url, migrate=True)
        batch = Batch("job", 1)
        published = await load(store, Batch("job", 0), 5)
        await store.bulk.publish(Batch("job", 0), published)
        lots = await load(store, batch, 10)
        server.kill()
        server.start()
        if kind is Postgres:  # its staging tables are not logged
            with pytest.raises(StagingLost):
                await store.bulk.publish(batch, lots)
            assert await pending(store) == 5
            lots = await load(store, batch, 10)
        assert (await store.bulk.publish(batch, lots)).new == 10
        assert await store.bulk.published(Batch("job", 0)) is not None
        assert await pending(store) == 15
        await store.close()
