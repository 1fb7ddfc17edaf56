"""Notices a device thread or an event loop that makes no progress."""
