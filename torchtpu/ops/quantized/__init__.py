"""Quantized and packed weights."""
