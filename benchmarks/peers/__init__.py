"""Runs the servers and libraries that snapcap is measured against."""
