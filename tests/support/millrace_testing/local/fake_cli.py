"""The `millrace` command with the fake services of this folder in place of the real ones."""

import sys

from millrace.cli.early_interrupts import listen_early

listen_early()  # as the real command does, whose imports come later

from millrace.cli.main import main  # noqa: E402
from millrace.local import stack  # noqa: E402

stack.SERVICES.update({name: f"millrace_testing.local.fake_{name.replace('-', '_')}" for name in stack.SERVICES})
stack.NEEDS = {module: ("millrace_testing.local.fake_service", module) for module in stack.SERVICES.values()}

sys.exit(main())
