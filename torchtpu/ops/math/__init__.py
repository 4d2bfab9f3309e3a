"""Elementwise arithmetic, reductions, scans, ops over lists, and optimizers."""
