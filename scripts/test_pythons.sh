#!/usr/bin/env bash
# Runs the unit and contract tests on each other Python that the metadata allows, each in an environment of its own.
# A version that this machine does not have is left out, with a line that says so; none at all is a failure.
# usage: scripts/test_pythons.sh VERSION...   for instance 3.12 3.13
set -euo pipefail
cd "$(dirname "$0")/.."

tested=0
for version in "$@"; do
  if ! python=$(scripts/find_python.sh "$version"); then
    echo "Left out: no Python $version on this machine"
    continue
  fi
  MILLRACE_VENV=.venv-$version PYTHON=$python scripts/setup.sh dev
  echo "Python $version"
  ".venv-$version/bin/python" -m pytest tests/unit tests/contract -n "${TEST_JOBS:-4}" --dist loadfile -m "not long and not slow and not gpu and not vllm"
  tested=$((tested + 1))
done
[ "$tested" -gt 0 ] || { echo "Error: none of Python $* is on this machine" >&2; exit 1; }
