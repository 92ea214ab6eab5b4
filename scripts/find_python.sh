#!/usr/bin/env bash
# Prints an interpreter of a version: of PATH, or of pyenv, whose shims may be for others. Exit code 1 if there is none.
# usage: scripts/find_python.sh VERSION   for instance 3.12
for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
  if "$candidate" -c "import sys; sys.exit(sys.version.split('.')[:2] != '$1'.split('.'))" >/dev/null 2>&1; then
    echo "$candidate"
    exit
  fi
done
exit 1
