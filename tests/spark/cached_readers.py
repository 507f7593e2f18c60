"""Readers that Spark tasks cache in their process."""

from millpond.spark import connection_cache


def close_cached() -> None:
    """Close them, as when the process of a task ends."""
    while connection_cache._cached:
        connection_cache._cached.popitem()[1].close()
