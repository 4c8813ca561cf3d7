"""`python -m genrl`: the command line, for processes that are started without the console script."""

from genrl.cli import main

if __name__ == "__main__":
    main()
