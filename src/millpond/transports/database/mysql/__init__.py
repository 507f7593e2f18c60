"""MySQL and MariaDB: words, connections, and texts that they need in another form."""
