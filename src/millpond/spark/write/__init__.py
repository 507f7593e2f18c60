"""Batch and streaming writes: staged by tasks, published by the driver."""
