"""`python -m kvbench` is the `kvbench` command."""

import sys

try:
    from kvbench.cli.app import main
except ModuleNotFoundError as error:
    sys.exit(f"kvbench: the library {error.name} is missing; `make venv` or `pip install -e .` brings it")

if __name__ == "__main__":
    main()
