"""Serves HTTP/1.1: connections, request bodies under limits, replies, and what wraps every request."""
