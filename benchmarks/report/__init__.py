"""Prints tables and draws pictures of what was measured."""
