"""Moves of key ranges between shards: steps at one database, rows that all shards have, and ids that are awaited."""
