"""The `millrace` command, and `python -m millrace.cli`."""

import sys

from millrace.cli.early_interrupts import listen_early


def main() -> int:
    """Run the command and return its exit code.

    `listen_early` comes before the imports of the commands, so that a Ctrl-C during them is not lost.
    """
    listen_early()
    from millrace.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
