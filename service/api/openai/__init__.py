"""Serves OpenAI's chat completions, with images by URL."""
