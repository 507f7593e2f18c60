"""The handlers of the routes, by subject."""
