"""Notices a device thread or an event loop that no longer goes on."""
