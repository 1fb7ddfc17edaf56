"""Holds the sources of everything that is compiled, and nothing else: the artifact key digests their code."""
