"""Proof on this machine: an attention layer on several ranks against one process."""
