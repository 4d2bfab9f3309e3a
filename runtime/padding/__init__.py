"""Padding: in comes a program whose sizes keep changing, out goes one of longer arrays that serves many sizes."""
