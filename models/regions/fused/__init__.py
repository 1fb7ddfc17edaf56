"""Computes regions on CUDA with fewer and larger kernels."""
