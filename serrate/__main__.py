"""`python -m serrate`: the command line, where its script is not installed."""

from serrate.cli import main

if __name__ == "__main__":
    main()
