"""The stage loop: attention in stages of a few heads, forward and backward, and how autograd and compilers see it."""
