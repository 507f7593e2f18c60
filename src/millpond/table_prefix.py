"""The prefix of the names of Millpond's tables."""

TABLE_PREFIX = "millpond_"
"""The default: no table of an application has such a name."""
