"""The workers room: presence of worker processes, and the reaper."""
