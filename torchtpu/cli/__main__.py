"""`python -m torchtpu.cli`: in come the command line's words, out goes its exit status."""

from torchtpu.cli import main

main()
