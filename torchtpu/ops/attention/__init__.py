"""Attention, plain, by blocks, by Pallas kernels and by FlexAttention's functions."""
