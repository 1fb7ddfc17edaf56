"""Turns an image and options into a caption: decode, prompt, engine, text."""
