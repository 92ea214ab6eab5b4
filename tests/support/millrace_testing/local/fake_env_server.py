"""The fake env-server process."""

import sys

from millrace_testing.local.fake_service import main

sys.exit(main("env-server"))
