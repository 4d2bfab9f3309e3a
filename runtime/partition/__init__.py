"""Programs taken apart: by repeats, by memory, and by what ranks have in common."""
