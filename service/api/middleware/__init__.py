"""Surrounds every request: its id, its key, its errors."""
