"""`python -m roundelay` is the command line."""

from roundelay.cli import main

if __name__ == "__main__":
    main()
