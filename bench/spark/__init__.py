"""Spark against Spark's own JDBC, on PostgreSQL: `python -m bench.spark`."""
