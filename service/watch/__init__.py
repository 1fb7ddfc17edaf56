"""Notices what no longer goes on."""
