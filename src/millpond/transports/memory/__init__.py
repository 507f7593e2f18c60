"""A transport in this process: for tests, for small programs, and as the model that stores are compared with.

Its meaning is that of the database store. It belongs to one event loop, and what it holds ends with the process.
`memory://` is private to its caller; everybody who connects to `memory://name` shares one.
"""

from millpond.transports.memory.transport import MemoryTransport, connect

__all__ = ["MemoryTransport", "connect"]
