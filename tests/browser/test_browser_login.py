"""A browser that `millrace dashboard` opens is logged in, though the page that leads there is not of our origin."""

import subprocess
import sys

import pytest

from millrace.rpc.access import ServerAccess
from millrace.rpc.tokens import new_token, token_line
from millrace.telemetry.settings import Settings
from millrace_testing.dashboard import ServedInThread

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
WAIT_MS = 60_000


def test_the_page_on_disk_leads_into_a_dashboard_that_demands_a_token(browser, run_writer, tmp_path, monkeypatch):
    token = new_token()
    (tmp_path / "token").write_text(token)
    (tmp_path / "tokens").write_text(token_line(token, "ada") + "\n")
    access = ServerAccess.of(Settings(tokens_file=str(tmp_path / "tokens")))
    seen = tmp_path / "seen"
    recorder = tmp_path / "browser"
    recorder.write_text(f'#!/bin/sh\necho "$@" > {seen}\n')
    recorder.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{recorder} %s")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MILLRACE_TOKEN_FILE", str(tmp_path / "token"))
    with ServedInThread(run_writer.store, tmp_path / "index", access=access) as served:
        command = [sys.executable, "-m", "millrace.cli.main", "dashboard", "--url", served.url, "--browser"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        context = browser.new_context()
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.goto(seen.read_text().strip())
        page.wait_for_url(f"{served.url}/")
        page.wait_for_selector("table tbody tr")
        context.close()
