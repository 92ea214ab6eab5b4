"""The fake trainer process."""

import sys

from fake_service import main

sys.exit(main("trainer"))
