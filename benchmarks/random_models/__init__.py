"""Describes captioners of random weights in real shapes, one file a family.

It needs no transformers, and imports no torch.
"""
