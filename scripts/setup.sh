#!/usr/bin/env bash
# Makes .venv with everything that the demo (and with `dev` the tests) needs. Idempotent and quick when nothing changed.
# usage: [PYTHON=python3.12] [MILLRACE_VENV=.venv-3.12] scripts/setup.sh [dev]
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
stamp=$venv/.millrace-setup
wanted=$(cat pyproject.toml constraints.txt environments/*/pyproject.toml tests/support/pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)-${1:-demo}
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
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --quiet)
if [ -t 1 ]; then quiet=(); else quiet=(--quiet); fi # a person sees progress
"${pip[@]}" "uv>=0.8"
echo "  torch"
# torch comes by pip: uv ignores pip's own configuration, which is where a CPU build is chosen.
"$venv/bin/python" -c 'import torch' 2>/dev/null || "${pip[@]}" --constraint constraints.txt torch
echo "  millrace and what it needs"
uv=("$venv/bin/python" -m uv pip install "${quiet[@]}" --python "$venv/bin/python" --constraint constraints.txt)
"${uv[@]}" --editable '.[local]'
"${uv[@]}" --no-deps --editable environments/reverse_text --editable environments/code_lookup
if [ "${1:-}" = dev ]; then
  echo "  what the tests need"
  "${uv[@]}" --group dev
  "${uv[@]}" --no-deps --editable tests/support
fi
echo "  bytecode"
# uv leaves bytecode to the first import, which then costs seconds in every service; a file for a newer Python may refuse.
"$venv/bin/python" -m compileall -qq -j 0 "$venv"/lib/python3*/site-packages/{transformers,verifiers,datasets,openai,grpc,botocore,boto3,aiohttp,fastapi,starlette,uvicorn} || true
echo "$wanted" > "$stamp"
