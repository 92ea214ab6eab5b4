"""The fake inference process."""

import sys

from fake_service import main

sys.exit(main("inference"))
