"""Computes what Florence-2 alone has: its encoder, and what stands between that and a decoder like BERT's."""
