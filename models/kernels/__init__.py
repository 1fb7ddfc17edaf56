"""Computes regions with Triton kernels for CUDA in 16 bits, in fewer and larger launches than a compiler makes.

Only a build imports these modules. A server opens packages that hold their machine code, and never imports Triton.
`layers.fused` says which kernels make up which region. benchmarks/NOTES.md has the measurements behind the block
sizes.
"""
