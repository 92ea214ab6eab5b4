#!/usr/bin/env bash
# libfaketime, with which wall clocks jump in tests. Where it cannot be had, those tests are skipped and say so.
set -euo pipefail

if compgen -G '/usr/lib/*/faketime/libfaketimeMT.so.1' >/dev/null || compgen -G '/usr/lib64/faketime/libfaketimeMT.so.1' >/dev/null; then
  exit 0
fi
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y faketime && exit 0
fi
echo "no libfaketime: clocks do not jump in this run (Debian: apt-get install faketime)" >&2
