"""The diagnosis room of a database."""
