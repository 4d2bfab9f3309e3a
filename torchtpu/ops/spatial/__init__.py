"""Convolutions, pooling and resizing of images."""
