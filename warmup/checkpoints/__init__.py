"""Finds the files of a checkpoint: in a folder, on the hub, in S3, or converted from older ones."""
