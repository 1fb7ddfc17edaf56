"""Serves snapcap's own API."""
