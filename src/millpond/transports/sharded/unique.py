"""Unique messages over shards: a value is read on one shard only, that of the message's key."""

from __future__ import annotations

import hashlib

import msgspec

from millpond.message import Message, Unique, check_text


def placed_by_value(message: Message) -> Message:
    """A unique message without a key gets its value as the key: all messages of a value are on one shard.

    With a key the value is unique among the messages of that key, also on the shard that has other keys with the value.
    So each value belongs to one key, and moves with its range.
    """
    if not (isinstance(message, Message) and isinstance(message.unique, Unique)):
        return message
    key, value = message.key, message.unique.value
    if key is None:
        return msgspec.structs.replace(message, key=value)
    if not (isinstance(key, str) and isinstance(value, str)) or key == value:
        return message
    check_text(value, "unique")
    both = hashlib.blake2b(f"{len(key)}:{key}{value}".encode(errors="replace"), digest_size=32).hexdigest()
    return msgspec.structs.replace(message, unique=msgspec.structs.replace(message.unique, value=f"by key: {both}"))
