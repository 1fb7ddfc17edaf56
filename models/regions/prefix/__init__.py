"""Computes the parts of captioners whose image is a prefix of the text, such as GIT and chat models."""
