"""The operations room: browse, count, change, purge, replay, record."""
