"""`python -m torchtpu.cli`: the command line."""

from torchtpu.cli import main

main()
