"""Turns image files into pixels, and token ids into text."""
