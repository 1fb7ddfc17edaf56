"""Reads command lines and runs their commands."""
