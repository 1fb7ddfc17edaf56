"""Chooses the next token of each row: greedily, or by penalties, sampling and beam search."""
