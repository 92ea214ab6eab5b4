"""The fake trainer process."""

import sys

from millrace_testing.local import fake_service


def main() -> int:
    """Run the fake trainer."""
    return fake_service.main("trainer")


if __name__ == "__main__":
    sys.exit(main())
