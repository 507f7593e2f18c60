"""The caller's own connections, transactions and pools."""
