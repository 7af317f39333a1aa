"""``upipe bench``: one attention layer through UPipe and through plain Ulysses, timed beside each other."""
