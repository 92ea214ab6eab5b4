"""The fake env-server process."""

import sys

from millrace_testing.local import fake_service


def main() -> int:
    """Run the fake env-server."""
    return fake_service.main("env-server")


if __name__ == "__main__":
    sys.exit(main())
