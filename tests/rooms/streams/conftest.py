"""Fixtures: a store on each database."""

from tests.stores import backend, clock, connect, store

__all__ = ["backend", "clock", "connect", "store"]
