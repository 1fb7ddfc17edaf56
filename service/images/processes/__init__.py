"""Keeps the processes that decode images, and speaks with them."""
