"""Names an artifact set by what decides whether it runs here, and seals its manifest with a signature."""
