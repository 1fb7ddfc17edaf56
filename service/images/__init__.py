"""Decodes images into pixels, in processes or threads."""
