"""Roles, and the grant of a caller: its name, roles and queues."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache

import msgspec

from millpond.errors import InvalidOption


class Role(StrEnum):
    PUBLISH = "publish"
    """publish messages"""
    CONSUME = "consume"
    """claim, extend and settle messages"""
    READ = "read"
    """see counts, messages, workers and streams"""
    OPERATE = "operate"
    """all of `read`, and change messages and queues"""


_INCLUDED = {Role.OPERATE: (Role.READ,)}


class Grant(msgspec.Struct, frozen=True):
    """The rights of one caller."""

    name: str
    roles: frozenset[Role]
    queues: tuple[str, ...] = ("*",)
    """Patterns of queue names: `*` stands for any characters."""

    @property
    def all_queues(self) -> bool:
        return "*" in self.queues

    def has(self, role: Role) -> bool:
        return role in self.roles or any(role in _INCLUDED.get(own, ()) for own in self.roles)

    def reaches(self, queue: str) -> bool:
        return matches_any(self.queues, queue)

    def allows(self, role: Role, queue: str) -> bool:
        return self.has(role) and self.reaches(queue)


ANYONE = Grant("local", frozenset(Role))
"""The grant of every caller of a server on loopback without tokens."""


def parse_roles(names: Iterable[str]) -> frozenset[Role]:
    try:
        return frozenset(Role(name) for name in names)
    except ValueError as e:
        raise InvalidOption(f"{e}; roles are {', '.join(Role)}") from None


def known_roles(names: Iterable[str]) -> frozenset[Role]:
    """Stored roles. One of another version gives no right."""
    return frozenset(Role(name) for name in names if name in set(Role))


def matches_any(patterns: Sequence[str], queue: str) -> bool:
    return any(_compiled(pattern).fullmatch(queue) is not None for pattern in patterns)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, re.split(r"\*+", pattern))), re.DOTALL)
