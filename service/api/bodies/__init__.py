"""Reads request bodies under limits, and writes replies."""
