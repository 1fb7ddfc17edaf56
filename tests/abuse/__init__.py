"""Attacks real servers."""
