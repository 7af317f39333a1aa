"""The ``upipe`` command: plan, check, bench and info."""
