"""Arrow record batches read from and written to a database."""
