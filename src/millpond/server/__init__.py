"""The server: HTTP/JSON and gRPC for programs in other languages, and for operators.

`settings.py` has its options, `routes.py` the one table of route and role, `application.py` the ASGI application,
`run_server.py` the process around it. The modules are imported one by one: tokens need none of the server's packages.
"""
