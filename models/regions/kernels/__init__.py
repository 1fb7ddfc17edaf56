"""Triton kernels for CUDA in 16 bits: fewer and fatter launches than a compiler makes of the regions.

Only what compiles imports them: a server opens packages that hold their machine code, and never imports Triton.
`regions.fused` says which region is made of which. benchmarks/NOTES.md has the measurements behind the shapes.
"""
