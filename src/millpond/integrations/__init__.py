"""Integrations with other libraries. Each module imports its library; import only those that you use."""
