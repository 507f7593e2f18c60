"""A shop on Millpond: web.py takes orders, worker.py ships them, shop.py is what they share."""
