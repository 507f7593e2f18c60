"""The dashboard: pages for operators, made by the server, live by server-sent events, without a build step.

`table.py` has every page with its role, `serving.py` the checks that all of them share, `pages.py` and `actions.py` the
handlers. They call the handlers of the HTTP interface, and so have its rights and masks.
"""
