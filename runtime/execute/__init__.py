"""Launching: the executor, sequences of programs, pending checks and memory."""
