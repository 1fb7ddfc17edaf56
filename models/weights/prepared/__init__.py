"""Keeps weights as regions read them in one file, so that a later start converts nothing."""
