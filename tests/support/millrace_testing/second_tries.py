"""A pytest plugin for runs that decide on a landing: `pytest -p millrace_testing.second_tries --second-tries 2`.

One test in five thousand that loses a race on a busy machine must not hide what the other tests say. Up to
`--second-tries` tests that failed are run once more after all others, alone, in a pytest of their own. What fails
again fails the run, as does one failure too many. What passes then is shown with its failure, as a race that is to be
mended: of the test, or of what it tests. The default is 0: nobody but a landing tries twice.
"""

import subprocess
import sys
from collections.abc import Iterator

import pytest

_OPTION = "--second-tries"
_LIMIT_S = 900.0
"""For all second tries; each test has a limit of its own."""


class _SecondTries:
    """Runs what failed once more, when everything else is over; in the process that prints."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Try again after the summary, which has every failure in full."""
        yield
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        assert isinstance(reporter, pytest.TerminalReporter)
        failed = list(dict.fromkeys(each.nodeid for key in ("failed", "error") for each in reporter.stats.get(key, [])))
        limit = int(session.config.getoption(_OPTION) or 0)
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= limit:
            return
        reporter.section("a second try, alone")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *failed]
        root = session.config.rootpath
        ended = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=False)
        reporter.write(ended.stdout)
        if ended.returncode == pytest.ExitCode.OK:
            for item in failed:
                reporter.write_line(f"a race, to be mended: failed above, passed when tried again: {item}", red=True)
            session.exitstatus = pytest.ExitCode.OK


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(_OPTION, type=int, default=0, help="tests that may fail once, if they pass when run again alone")


def pytest_configure(config: pytest.Config) -> None:
    """Register in the process that prints, which no worker is."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_SecondTries())
