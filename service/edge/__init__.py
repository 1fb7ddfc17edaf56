"""Speaks HTTP/1.1 on connections, within bounds, before the application."""
