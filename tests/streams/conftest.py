"""Every database in turn."""

from tests.stores import backend, clock, connect, store

__all__ = ["backend", "clock", "connect", "store"]
