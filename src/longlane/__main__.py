"""`python -m longlane`."""

from longlane.cli import main

if __name__ == "__main__":
    main()
