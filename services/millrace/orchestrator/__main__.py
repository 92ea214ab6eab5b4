"""`python -m millrace.orchestrator`."""

import sys

from millrace.orchestrator.main import main

sys.exit(main())
