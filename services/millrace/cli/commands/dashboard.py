"""`millrace dashboard`: the address of the dashboard, with a code that logs a browser in once."""

import html
import http.client
import os
import re
import ssl
import sys
import webbrowser
from pathlib import Path
from urllib.parse import urlsplit

import click

from millrace.cli.errors import CliError

TIMEOUT_S = 10.0
_MAX_BYTES = 1 << 16
_LOGIN = re.compile(r"/login/[A-Za-z0-9_-]{16,64}")


@click.command()
@click.option("--url", metavar="URL", help="Of a deployment; else MILLRACE_DASHBOARD, else that of a stack here.")
@click.option("--dir", "directory", type=click.Path(path_type=Path),
              help="Of the stack that works in this directory; else of the one below outputs: `millrace up`, or a "
              "`millrace rl` without a server.")  # fmt: skip
@click.option("--browser/--no-browser", default=None, help="Open it in a browser (default on a terminal).")
def dashboard(url: str | None, directory: Path | None, browser: bool | None) -> None:
    """Print the address of the dashboard and open it.

    The address has a code in it that logs one browser in, once, within two minutes. Where the deployment demands
    tokens, the code comes for yours: MILLRACE_TOKEN_FILE or --token-file.
    """
    from millrace.cli.connection import environ

    base = url or environ().get("MILLRACE_DASHBOARD") or _of_stack(directory)
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise CliError(f"{base} is no address of a dashboard", hint="it looks like http://127.0.0.1:8080")
    base = f"{parts.scheme}://{parts.netloc}"
    address = base + _code_path(base)
    click.echo(address)
    if browser or (browser is None and sys.stdout.isatty()):
        try:
            page = _page_that_leads_to(address)
        except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows where home is
            click.echo(f"no page for the browser can be written ({error}): open the address yourself", err=True)
        else:
            webbrowser.open(page.as_uri())


def _page_that_leads_to(address: str) -> Path:
    """Write an HTML page that redirects to `address`, readable by this user only, and return its path.

    The browser gets the page instead of the address: all users see command lines, and the address contains the login
    code.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # a relative one is to be ignored
        cache = Path.home() / ".cache"
    page = cache / "millrace" / "login.html"
    page.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    page.unlink(missing_ok=True)  # of the last time, when its code was spent
    where = html.escape(address, quote=True)
    with open(os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(
            f'<!doctype html><meta http-equiv="refresh" content="0; url={where}"><a href="{where}">{where}</a>\n'
        )
    return page


def _of_stack(directory: Path | None) -> str:
    """Return the dashboard's address of the stack in `directory`; of the only stack here if `directory` is None.

    Raises CliError if no stack with a dashboard runs there.
    """
    from millrace.cli.connection import OUTPUTS, choose_stack, read_stack

    stack = choose_stack(option="--dir") if directory is None else read_stack(directory)
    found = stack.text("dashboard") if stack is not None else None
    if found is None:
        where = f"below {OUTPUTS}" if directory is None else f"in {directory}"
        raise CliError(
            f"no stack with a dashboard runs {where}",
            hint="start one with `millrace up`, name its directory with --dir, or a deployment's address with --url",
        )
    return found


def _code_path(base: str) -> str:
    """Ask the server at `base` for a login code; return the path that logs in with it.

    Raises UnavailableError if nothing answers there, CliError if the token is refused or the server is no dashboard.
    """
    from millrace.cli.connection import environ
    from millrace.decoding import decode_object
    from millrace.errors import CorruptObjectError, UnavailableError
    from millrace.rpc.access import ClientAccess, is_loopback
    from millrace.rpc.tls import client_context

    access = ClientAccess.public_from_environ(environ())
    place = urlsplit(base)
    host, port = place.hostname or "", place.port or (443 if place.scheme == "https" else 80)
    if place.scheme == "https":
        context = ssl.create_default_context() if access.tls is None else client_context(access.tls)
        connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
    else:
        if access.secret is not None and not (access.is_insecure or is_loopback(host)):
            raise CliError(
                f"refusing to send a token to {base} in plain text", hint="use https, or allow it: --insecure"
            )
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/api/login-codes", b"{}", {"Content-Type": "application/json", **access.headers()})
        answer = connection.getresponse()
        status, body = answer.status, answer.read(_MAX_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(
            f"no dashboard answers at {base}: {error}",
            reason="UNREACHABLE",
            remedy="see that the stack is up, or that MILLRACE_DASHBOARD_LISTEN is set for the orchestrator",
        ) from error
    finally:
        connection.close()
    if status == 401:
        raise CliError(f"{base} does not accept this token", hint="give a valid one with --token-file")
    try:
        path = decode_object(body, what=f"the answer of {base}", reason="ANSWER_UNREADABLE").get("path")
    except CorruptObjectError:
        path = None
    # The path is opened in a browser, so it may lead to a login and nowhere else.
    if status != 200 or not isinstance(path, str) or not _LOGIN.fullmatch(path):
        raise CliError(f"what answers at {base} is no dashboard ({status})", hint="see --url, or MILLRACE_DASHBOARD")
    return path
