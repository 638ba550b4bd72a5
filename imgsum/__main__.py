"""`python -m imgsum` is the command."""

from imgsum.cli import main

if __name__ == "__main__":
    main()
