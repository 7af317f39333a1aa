"""Losses that are right at every ZeRO stage, whole, tiled and of sequences."""
