"""The `millrace` command, and `python -m millrace.cli`."""

import sys

from millrace.cli.early_interrupts import listen_early


def main() -> int:
    """Run the command; its imports come later than the first Ctrl-C may."""
    listen_early()
    from millrace.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
