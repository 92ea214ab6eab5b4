"""The fake orchestrator process."""

import sys

from millrace_testing.local import fake_service


def main() -> int:
    """Run the fake orchestrator."""
    return fake_service.main("orchestrator")


if __name__ == "__main__":
    sys.exit(main())
