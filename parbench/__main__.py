"""Run the command line with ``python -m parbench``."""

from parbench.cli import run

if __name__ == "__main__":
    run()
