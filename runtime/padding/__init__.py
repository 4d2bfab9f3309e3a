"""Sizes that change: programs on arrays that are longer than what counts of them."""
