"""Products, factorizations, distances and Fourier transforms."""
