"""Numbered migrations, and the names of tables that they make."""
