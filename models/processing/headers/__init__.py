"""Reads what the head of an image's file says, and leaves out what no codec needs, before a codec sees it."""
