"""Exports of the archive to lakes: the room, and the ranges that purge compares."""
