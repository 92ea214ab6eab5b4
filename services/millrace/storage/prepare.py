"""Make an object store ready before the services start: `python -m millrace.storage.prepare [--create-bucket]`.

Waits until the store of `MILLRACE_STORE_URL` answers, creates its bucket if asked to, and tries out what runs rest on
(`self_test`). For compose files and init containers. Exit codes are those of `millrace.errors`.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence

from millrace.errors import MillraceError, UnavailableError
from millrace.storage import open_store
from millrace.storage.s3 import S3Store
from millrace.storage.self_test import self_test
from millrace.telemetry.settings import Settings

_DEADLINE_S = 120.0
_RETRY_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: create the bucket if requested, then test the store; return an exit code.

    Before the bucket is created, the store is waited for; without `--create-bucket` it has to answer at once. `argv` is
    by default that of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m millrace.storage.prepare", description="Prepare the object store.")
    parser.add_argument("--create-bucket", action="store_true", help="create the bucket if it is missing")
    parser.add_argument("--timeout", type=float, default=_DEADLINE_S, metavar="SECONDS", help="default 120")
    options = parser.parse_args(argv)
    try:
        settings = Settings.from_env(os.environ, required=["store_url"])
        store = open_store(settings.require("store_url"))
        if options.create_bucket and isinstance(store, S3Store):
            _until_it_answers(store, timeout_s=options.timeout)
        self_test(store, prefix=settings.prefix).result()
    except MillraceError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{store.describe()} is ready")
    return 0


def _until_it_answers(store: S3Store, *, timeout_s: float) -> None:
    """Create the bucket if it is missing, trying again while the server does not answer.

    Raises the last UnavailableError after `timeout_s` seconds.
    """
    ends = time.monotonic() + timeout_s
    # unregistered wait: a command of its own, which prints what it waits for
    while True:
        try:
            store.ensure_bucket()
            return
        except UnavailableError as error:
            if time.monotonic() > ends:
                raise
            print(f"waiting for {store.describe()}: {error.message}", file=sys.stderr, flush=True)
            time.sleep(_RETRY_S)


if __name__ == "__main__":
    sys.exit(main())
