"""The access room of a database."""
