"""Connect to the shards of a pond, make them shards, and show them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from millpond.clock import monotonic, seconds
from millpond.errors import InvalidOption, ShardMapMismatch, ShardUnavailable
from millpond.loop import gather_all
from millpond.message import BODY_LIMIT, LIVE, new_id
from millpond.seam.shards import ShardStatus
from millpond.transports.database.moves.common_rows import CommonRows
from millpond.transports.database.moves.move_steps import become_mover
from millpond.transports.database.options import StoreOptions
from millpond.transports.database.store import DatabaseStore
from millpond.transports.shard_map import ShardMap, ShardRecord, check_names
from millpond.transports.sharded.members import AT_ONCE, Members
from millpond.transports.sharded.shard import ANSWER_WITHIN, Shard, mismatch, no_map, same_pond
from millpond.transports.sharded.store import ShardedStore
from millpond.transports.sharded.transactions import ShardedTransactions
from millpond.transports.url import Url

OWN_OPTIONS = ("shards", "reroute")
_LEAST_POOL = 2

ConnectOne = Callable[..., Awaitable[DatabaseStore]]


def check_options(urls: Sequence[Url], options: dict[str, Any]) -> dict[str, Any]:
    """The options of each shard's store; those of the pond are checked here."""
    if len({url.raw for url in urls}) < len(urls):
        raise InvalidOption("two of the URLs are the same; give each shard once")
    if options.get("pool") is not None:
        raise InvalidOption("pool belongs to one database; leave it out with several URLs")
    if options.get("reroute", False) not in (True, False):
        raise InvalidOption(f"reroute must be True or False, not {options['reroute']!r}")
    wanted = options.get("shards")
    if wanted is not None and (isinstance(wanted, str) or not all(isinstance(one, str) for one in wanted)):
        raise InvalidOption("shards must be a list of names or key ranges, such as ['a', 'b'] or ['-80']")
    given = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    # All shards share the connections of a process, as far as that is possible.
    wanted = given.get("pool_size", StoreOptions().pool_size)
    return {**given, "pool_size": max(min(_LEAST_POOL, wanted), wanted // len(urls))}


async def connect(
    urls: Sequence[Url], connect_one: ConnectOne, transactions: ShardedTransactions, options: dict[str, Any]
) -> ShardedStore:
    """A store of all shards. One that does not answer is connected when it is back; its name follows by elimination."""
    given = check_options(urls, options)
    shards = [Shard(url, lambda url: connect_one(url, **given)) for url in urls]
    try:
        map_ = await _find_map(shards)
        members = Members(
            shards,
            map_,
            map_.select(options.get("shards") or map_.shards),
            change_within=seconds(given.get("busy_timeout", StoreOptions().busy_timeout), "busy_timeout"),
        )
    except BaseException:
        await asyncio.gather(*(shard.close() for shard in shards), return_exceptions=True)
        raise
    return ShardedStore(
        members,
        transactions,
        body_limit=given.get("body_limit", BODY_LIMIT),
        reroute=bool(options.get("reroute", False)),
    )


async def _find_map(shards: Sequence[Shard]) -> ShardMap:
    at_once = asyncio.Semaphore(AT_ONCE)

    async def ask(shard: Shard) -> None:
        async with at_once:
            await shard.call(_nothing)
            if len(shards) > AT_ONCE:
                await shard.rest()

    results = await asyncio.gather(*map(ask, shards), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, ShardUnavailable):
            raise result
    answered = [shard for shard in shards if shard.map is not None]
    if not answered:
        raise next(result for result in results if isinstance(result, BaseException))
    map_ = max((shard.map for shard in answered if shard.map is not None), key=lambda one: one.version)
    for shard in answered:
        if shard.map is not None and not same_pond(shard.map, map_):
            raise mismatch(shard.url, ShardRecord(shard.name, shard.map), map_)
    for shard in answered:
        shard.map = map_
    names = [shard.name for shard in answered]
    check_complete(names, map_, given=len(shards))
    rest = [name for name in map_.shards if name not in names]
    for shard in shards:
        if shard.map is None:
            # A guess if several are away; the first answer corrects it.
            shard.map, shard.name, shard.guessed = map_, rest.pop(0), True
    return map_


def check_complete(names: Sequence[str], map_: ShardMap, *, given: int | None = None) -> None:
    """Raise unless the URLs are all shards of the map. `given`: number of URLs, if some do not answer."""
    count = given or len(names)
    if len(set(names)) < len(names):
        raise ShardMapMismatch(f"two of the URLs are the same shard ({', '.join(sorted(names))}); give each shard once")
    if count != len(map_.shards):
        raise ShardMapMismatch(
            f"{count} URLs were given, and the shard map has {len(map_.shards)} shards: "
            f"{', '.join(map_.shards)}; give the URL of each of them"
        )


async def _nothing(store: DatabaseStore) -> None:
    """Only connect."""


async def init(
    urls: Sequence[Url],
    connect_one: ConnectOne,
    options: dict[str, Any],
    *,
    names: Sequence[str] | None,
    with_messages: bool,
) -> ShardMap:
    """Make the databases the shards of one new map, with key ranges of equal size in the order of the URLs.

    May be repeated: an init that was interrupted is finished.
    """
    check_options(urls, options)
    given = list(names) if names else [f"s{n}" for n in range(len(urls))]
    check_names(given)
    if len(given) != len(urls):
        raise InvalidOption(f"{len(urls)} URLs and {len(given)} names were given; give one name for each")
    stores: list[DatabaseStore] = []
    try:
        for url in urls:
            stores.append(await connect_one(url, **options))
        records = [await store.shards.record() for store in stores]
        known = {record.map for record in records if record is not None}
        map_ = known.pop() if known else ShardMap.even(new_id().hex, given)
        wanted = [ShardRecord(name, map_) for name in given]
        if (
            known
            or map_.shards != tuple(given)
            or any(a not in (None, b) for a, b in zip(records, wanted, strict=True))
        ):
            raise ShardMapMismatch(
                "one of the databases is a shard already, by another map or under another name; millpond shards status "
                "prints its map"
            )
        if not with_messages and len(stores) > 1:
            for store, record in zip(stores, records, strict=True):
                if record is None and await store.operations.count():
                    raise ShardMapMismatch(
                        f"the database at {store.url} has messages, and some would belong to other shards; empty it, "
                        "or give --with-messages: they stay there and are delivered from there"
                    )
        for store, record in zip(stores, wanted, strict=True):
            await store.shards.enter(record)
        return map_
    finally:
        for store in stores:
            await store.close()


async def status(urls: Sequence[Url], connect_one: ConnectOne, options: dict[str, Any]) -> list[ShardStatus]:
    """Each shard, also if others do not answer or have another map."""
    maps: list[ShardMap] = []

    async def one(url: Url) -> ShardStatus:
        try:
            async with asyncio.timeout(2 * ANSWER_WITHIN):
                store = await connect_one(url, **options)
                try:
                    began = monotonic()
                    record = await store.shards.record()
                    took = monotonic() - began
                    if record is not None:
                        maps.append(record.map)
                    counts = await store.operations.count()
                    pending, incoming = await store.moving.pending(), await store.moving.count_incoming()
                finally:
                    await store.close()
        except (ShardMapMismatch, InvalidOption):
            raise
        except Exception as e:
            error = url.hide(e) or type(e).__name__
            return ShardStatus(name="", url=str(url), ranges=[], version=None, answers=False, error=error)
        live = sum(stats.counts.get(state, 0) for stats in counts for state in LIVE)
        return ShardStatus(
            name=record.name if record else "",
            url=str(url),
            ranges=record.map.ranges_of(record.name) if record else [],
            version=record.map.version if record else None,
            answers=True,
            seconds=took,
            live=live,
            incoming=incoming,
            change=None if pending.change is None else str(pending.change),
        )

    found = list(await asyncio.gather(*map(one, urls)))
    if maps:
        known = {status.name for status in found}
        missing = [name for name in max(maps, key=lambda map_: map_.version).shards if name not in known]
        away = [n for n, status in enumerate(found) if not status.answers]
        if len(missing) == len(away) == 1:
            found[away[0]] = msgspec.structs.replace(found[away[0]], name=missing[0])
    return found


async def records(urls: Sequence[Url], connect_one: ConnectOne, options: dict[str, Any]) -> list[ShardRecord] | None:
    """The records of all shards of one map, in the order of the URLs; None if none has a map."""

    async def one(url: Url) -> ShardRecord | None:
        store = await connect_one(url, **options, pool_size=1)
        try:
            return await store.shards.record()
        finally:
            await store.close()

    found = await gather_all(map(one, urls))
    known = [record for record in found if record is not None]
    if not known:
        return None
    newest = max((record.map for record in known), key=lambda one: one.version)
    for url, record in zip(urls, found, strict=True):
        if record is None:
            raise no_map(url)
        if not same_pond(record.map, newest):
            raise mismatch(url, record, newest)
    check_complete([record.name for record in known], newest)
    return [ShardRecord(record.name, newest) for record in known]


@asynccontextmanager
async def opened(
    urls: Sequence[Url], connect_one: ConnectOne, options: dict[str, Any]
) -> AsyncIterator[tuple[dict[str, DatabaseStore], ShardMap]]:
    """Stores of all shards by their names, and the newest version of the map. Every shard must answer."""
    stores: list[DatabaseStore] = []
    try:
        for url in urls:
            stores.append(await connect_one(url, **options))
        by_name: dict[str, DatabaseStore] = {}
        maps: list[ShardMap] = []
        for url, store in zip(urls, stores, strict=True):
            record = await store.shards.record()
            if record is None:
                raise no_map(url)
            by_name[record.name] = store
            maps.append(record.map)
        newest = max(maps, key=lambda one: one.version)
        for url, store, map_ in zip(urls, stores, maps, strict=True):
            if not same_pond(map_, newest):
                name = next(name for name, one in by_name.items() if one is store)
                raise mismatch(url, ShardRecord(name, map_), newest)
        check_complete([*by_name], newest, given=len(urls))
        yield by_name, newest
    finally:
        for store in stores:
            await store.close()


async def add(urls: Sequence[Url], connect_one: ConnectOne, options: dict[str, Any], *, name: str) -> ShardMap:
    """Add the one database without a map as a shard that owns no range yet. May be repeated."""
    check_options(urls, options)
    stores: list[DatabaseStore] = []
    try:
        for url in urls:
            stores.append(await connect_one(url, **options))
        records = [await store.shards.record() for store in stores]
        known = [record.map for record in records if record is not None]
        if not known:
            raise no_map(urls[0])
        newest = max(known, key=lambda one: one.version)
        if not all(same_pond(map_, newest) for map_ in known):
            raise ShardMapMismatch("the databases belong to different shard maps; give the URLs of one map")
        fresh = [store for store, record in zip(stores, records, strict=True) if record is None]
        if name not in newest.shards:
            if len(fresh) != 1:
                raise InvalidOption(f"{len(fresh)} of the databases have no shard map; give the URL of the new one too")
            if await fresh[0].operations.count():
                raise ShardMapMismatch(f"the database at {fresh[0].url} has messages; give an empty one")
            newest = newest.with_shard(name)
        check_complete([record.name for record in records if record], newest, given=len(stores))
        named = {record.name: store for store, record in zip(stores, records, strict=True) if record is not None}
        coordinator = named[newest.shards[0]]
        if (pending := (await coordinator.moving.pending()).change) is not None:
            raise ShardMapMismatch(f"a change of the shard map is pending ({pending}); finish it first")
        begun = await become_mover(coordinator.moving, [store.moving for store in named.values()], None)
        epoch = begun.epoch
        for store in stores:
            await store.moving.fence(epoch)
        # A move may have begun, or ended, since the maps were read. From here on none can change them.
        if begun.change is not None or records != [await store.shards.record() for store in stores]:
            raise ShardMapMismatch(
                "another operator changes the shard map; nothing was added. Let that one finish, or run its command "
                "again; then add the shard"
            )
        for store in fresh:
            rows = CommonRows(store.runner)
            for other in named.values():
                await rows.add_settings(epoch, await CommonRows(other.runner).settings())
            # A token counts if every shard has it, so those of one shard are enough.
            await rows.replace_tokens(epoch, await CommonRows(coordinator.runner).tokens())
            await store.shards.enter(ShardRecord(name, newest))
        for store in stores:
            await store.moving.switch(epoch, newest)
        await coordinator.moving.end(epoch)
        return newest
    finally:
        for store in stores:
            await store.close()
