"""`python -m imgsum` is the command."""

from imgsum.cli import main

main()
