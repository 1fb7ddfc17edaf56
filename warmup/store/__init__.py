"""Keeps artifact sets in folders and S3: fetched verified, published whole, under a lease."""
