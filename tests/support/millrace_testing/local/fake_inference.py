"""The fake inference process."""

import sys

from millrace_testing.local import fake_service


def main() -> int:
    """Run the fake inference service."""
    return fake_service.main("inference")


if __name__ == "__main__":
    sys.exit(main())
