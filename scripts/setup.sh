#!/usr/bin/env bash
# Makes .venv with everything that the demo (and with `dev` the tests) needs. Idempotent and quick when nothing changed.
# usage: [PYTHON=python3.12] [MILLRACE_VENV=.venv-3.12] [MILLRACE_CONSTRAINTS=FILE] scripts/setup.sh [dev]
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3.12 python3.13 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      python=$candidate; break
    fi
  done
fi
if [ -z "$python" ]; then
  echo "Error: no Python 3.11, 3.12 or 3.13 on PATH; install one, or set PYTHON=/path/to/python" >&2
  exit 2
fi

venv=${MILLRACE_VENV:-.venv}
constraints=${MILLRACE_CONSTRAINTS:-constraints.txt}
stamp=$venv/.millrace-setup
wanted=$(cat pyproject.toml "$constraints" environments/*/pyproject.toml tests/support/pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)-${1:-demo}
have=$(cat "$stamp" 2>/dev/null || true)
if [ "$have" = "$wanted" ] || [ "$have" = "${wanted%-demo}-dev" ]; then
  exit 0
fi

echo "Setting up $venv with $($python --version)"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  rm -rf "$venv" # absent, or left behind by a creation that failed half-way
  if ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    echo "Error: $python cannot make virtual environments; install its venv module (Debian: python3-venv) and try again" >&2
    exit 2
  fi
fi
unset PYTHONDONTWRITEBYTECODE # imports of transformers and verifiers take twice as long without bytecode
# Twice quiet leaves errors only: an index that has no torch makes pip warn once a package.
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet --quiet "uv>=0.8"
if [ -t 1 ]; then quiet=(); else quiet=(--quiet); fi # a person sees progress
# uv ignores pip's own configuration, which is where a CPU build of torch is chosen: it gets the same as variables.
variables=$("$venv/bin/python" scripts/pip_indexes.py)
unset MILLRACE_NO_INDEX
while IFS= read -r line; do
  name=${line%%=*}
  [ -z "$name" ] || [ -n "${!name-}" ] || export "${line?}" # what uv is told itself counts more
done <<< "$variables"
uv=("$venv/bin/python" -m uv pip install ${quiet[@]+"${quiet[@]}"} ${MILLRACE_NO_INDEX:+--no-index} --python "$venv/bin/python" --constraint "$constraints")
echo "  millrace and what it needs"
"${uv[@]}" --editable '.[local]'
"${uv[@]}" --no-deps --editable environments/reverse_text --editable environments/code_lookup
if [ "${1:-}" = dev ]; then
  echo "  what the tests need"
  "${uv[@]}" --group dev
  "${uv[@]}" --no-deps --editable tests/support
fi
echo "  bytecode"
# uv leaves bytecode to the first import, which then costs seconds in every service: two processes import what those do.
services='from millrace.local.stack import NEEDS; [importlib.import_module(name) for needed in NEEDS.values() for name in needed]'
others='datasets anthropic openai matplotlib.pyplot millrace.cli.main millrace.env_server.adapters.v0 millrace.env_server.adapters.renderer'
"$venv/bin/python" -c "import importlib; $services" &
if ! "$venv/bin/python" -c "import ${others// /, }" || ! wait $!; then
  echo "Error: what was installed into $venv cannot be imported, see above; remove $venv and try again" >&2
  exit 5
fi
echo "$wanted" > "$stamp"
