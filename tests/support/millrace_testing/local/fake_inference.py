"""The fake inference process."""

import sys

from millrace_testing.local.fake_service import main

sys.exit(main("inference"))
