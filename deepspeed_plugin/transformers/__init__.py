"""Attention modules of Transformers: which are served, what is known of each, and the forward that replaces theirs."""
