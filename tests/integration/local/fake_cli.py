"""The `millrace` command with the fake services of this folder in place of the real ones."""

import sys

from millrace.cli.main import main
from millrace.local import stack

stack.SERVICES.update({name: f"fake_{name.replace('-', '_')}" for name in stack.SERVICES})

sys.exit(main())
