"""Layers, activations and losses of neural networks."""
