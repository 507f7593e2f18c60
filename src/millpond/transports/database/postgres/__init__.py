"""PostgreSQL: words, connections, one-statement writes, Arrow by COPY."""
