"""Publish, claim, settle and reap as steps."""
