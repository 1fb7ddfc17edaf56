"""Regions made of fewer and fatter kernels."""
