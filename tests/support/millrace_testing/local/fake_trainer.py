"""The fake trainer process."""

import sys

from millrace_testing.local import fake_service


def main() -> int:
    """Be it."""
    return fake_service.main("trainer")


if __name__ == "__main__":
    sys.exit(main())
