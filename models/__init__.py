"""Model definitions as pure region functions, their weights, preprocessing and tokenizer. Torch only."""
