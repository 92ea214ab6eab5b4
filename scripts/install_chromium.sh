#!/usr/bin/env bash
# The distribution's Chromium and Playwright's driver, for the tests of the dashboard; without them these are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -c 'import playwright' 2>/dev/null || .venv/bin/python -m pip install --quiet 'playwright>=1.50' ||
  echo "no playwright: the tests in browsers are skipped" >&2
if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null; then
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core ||
      echo "no chromium: the tests in a browser are skipped" >&2
  else
    echo "no chromium: the tests in a browser are skipped (Debian: apt-get install chromium)" >&2
  fi
fi
