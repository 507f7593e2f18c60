"""A shop on Millpond: web.py takes orders, worker.py ships them, both use shop.py."""
