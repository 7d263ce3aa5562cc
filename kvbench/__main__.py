"""`python -m kvbench` is the `kvbench` command."""

from kvbench.cli.app import main

if __name__ == "__main__":
    main()
