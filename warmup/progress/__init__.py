"""Records how far a start is, and how long each phase took."""
