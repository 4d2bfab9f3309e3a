"""`python -m torchtpu`: the command line, for where the script `torchtpu` is not on the path."""

from torchtpu.cli import main

main()
