"""Keeps prepared weights in the artifact folder: finds a checkpoint's without reading it, and writes them."""
