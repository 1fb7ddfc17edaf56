"""Bounds what requests may make the server hold."""
