"""Reads request bodies within their bounds, and writes replies."""
