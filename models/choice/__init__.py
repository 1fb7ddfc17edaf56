"""Chooses the next token of eager steps from logits."""
