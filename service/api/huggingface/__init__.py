"""Serves the API of Hugging Face's inference servers."""
