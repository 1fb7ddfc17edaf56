"""Reads the headers of image files before a codec sees the data, and removes parts that no codec needs."""
