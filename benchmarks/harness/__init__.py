"""Runs processes and servers, and measures them in turn."""
