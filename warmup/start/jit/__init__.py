"""Starts with torch.compile, from caches that an earlier start has published."""
