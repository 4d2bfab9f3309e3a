"""Regions with collectives, which ranks launch together."""
