"""Memory before there is a run: shapes of models, closed forms, and the instrument that measures them."""
