"""The gRPC interface: `millpond.proto` describes it, `service.py` answers calls, `streams.py` sends messages."""
