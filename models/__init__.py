"""Defines captioners as pure region functions, with their weights, preprocessing and tokenizer."""
