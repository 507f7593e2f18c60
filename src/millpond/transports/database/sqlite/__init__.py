"""SQLite: words, connections, and the store in memory."""
