"""Turns a region at a bucket into a callable, one module a backend, all called alike."""
