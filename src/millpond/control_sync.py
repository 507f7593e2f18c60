"""Operator verbs for programs without an event loop."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from millpond.connections import LoopConnections
from millpond.control import Control

Connections = Callable[[], LoopConnections]
"""The connections of the pond now: a test replaces them, also those of verbs that a module keeps."""


class ControlSync:
    """`Control` with blocking verbs: `pond.control_sync.operations.pause("orders")`.

    Each verb has the parameters and the result of the async one in `Control`, `Operations`, `Streams` or `Workers`.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    @property
    def operations(self) -> _Room:
        return _Room(self._connections, ("operations",))

    @property
    def periodic(self) -> _Room:
        return _Room(self._connections, ("periodic",))

    @property
    def streams(self) -> _Room:
        return _Room(self._connections, ("streams",))

    @property
    def workers(self) -> _Room:
        return _Room(self._connections, ("workers",))

    def __getattr__(self, name: str) -> Any:
        return _verb(self._connections, (), Control, name)


class _Room:
    def __init__(self, connections: Connections, path: tuple[str, ...]) -> None:
        self._connections = connections
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return _verb(self._connections, self._path, None, name)


def _verb(connections: Connections, path: tuple[str, ...], owner: type | None, name: str) -> Any:
    if name.startswith("_") or (owner is not None and not inspect.iscoroutinefunction(getattr(owner, name, None))):
        raise AttributeError(f"there is no verb {'.'.join((*path, name))!r}")

    async def run(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        room: Any = Control(await connections().transport())
        for part in path:
            room = getattr(room, part)
        return await getattr(room, name)(*args, **options)

    @functools.wraps(getattr(owner, name) if owner is not None else run)
    def call(*args: Any, **options: Any) -> Any:
        return connections().wait_for(lambda: run(args, options))

    return call
