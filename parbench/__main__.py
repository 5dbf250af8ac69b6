"""Run the command line with ``python -m parbench``."""

from parbench.cli import main

if __name__ == "__main__":
    main()
