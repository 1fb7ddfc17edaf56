"""Wraps every request: gives it an id, checks its key and its origin, and handles its errors."""
