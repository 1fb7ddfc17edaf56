"""Computes the parts that the blocks of several families share: attention, linear layers, activations."""
