"""Chooses the next token of each row: the greedy one, and what penalties, sampling and beams make of it."""
