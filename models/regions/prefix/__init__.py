"""Computes the parts of captioners whose image is a prefix of the text, as GIT and chat models."""
