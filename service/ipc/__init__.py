"""Forks processes and shares memory and messages with them."""
