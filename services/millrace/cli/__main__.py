"""`python -m millrace.cli`."""

import sys

from millrace.cli.main import main

sys.exit(main())
