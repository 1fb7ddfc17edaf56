"""Measures steps, kernels and transfers on a device."""
