"""Computes the layers of encoders and decoders, and arranges their weights.

All functions that are compiled are here. A module that the dimensions of an encoder or decoder name has
``regions(config)``, which returns the functions of its regions, and ``weights(take, config)``, which returns their
weights. The artifact key digests the code of this folder.
"""
