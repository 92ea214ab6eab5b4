"""The fake env-server process."""

import sys

from fake_service import main

sys.exit(main("env-server"))
