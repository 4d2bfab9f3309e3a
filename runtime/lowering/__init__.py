"""From a recorded program to StableHLO text."""
