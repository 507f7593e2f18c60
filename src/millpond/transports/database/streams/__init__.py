"""The streams room: claims of Spark queries, fenced by an epoch."""
