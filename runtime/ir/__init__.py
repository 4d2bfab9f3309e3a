"""Recorded programs: their data classes, the calls in them, and their serialized form."""
