"""Keeps weights in one file, as regions read them, so that later starts convert nothing."""
