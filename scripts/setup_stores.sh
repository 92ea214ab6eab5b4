#!/usr/bin/env bash
# Makes .venv-stores: real S3 servers of requirements/stores.txt, each in a directory of its own, and Ceph's gateway from
# Debian's packages where this is root on Debian. Idempotent and quick when nothing changed; 0.5 GB of disk and a minute the first
# time. A server that does not install is left out with a line, and its test is skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${MILLRACE_VENV:-.venv}/bin/python
place=.venv-stores

install() { # REGISTRY PIN DIRECTORY
  case $1 in
    pypi)
      "$python" -m uv venv --quiet --python "$python" "$3" &&
        "$python" -m uv pip install --quiet --python "$3/bin/python" "$2" ;;
    npm)
      mkdir -p "$3" && npm install --silent --no-audit --no-fund --no-save --prefix "$3" "${2/==/@}" ;;
    *) echo "requirements/stores.txt: no registry $1" >&2; return 2 ;;
  esac
}

while read -r registry pin name; do
  case $registry in '' | '#'*) continue ;; esac
  target=$place/${name:-${pin%%==*}}
  wanted="$registry $pin $("$python" --version)"
  if [ "$(cat "$target/.millrace-setup" 2>/dev/null || true)" = "$wanted" ]; then
    continue
  fi
  echo "Setting up $target: $pin"
  rm -rf "$target"
  if install "$registry" "$pin" "$target" < /dev/null; then
    echo "$wanted" > "$target/.millrace-setup"
  else
    rm -rf "$target"
    echo "Left out: $pin did not install; the messages above say why" >&2
  fi
done < requirements/stores.txt

ceph="radosgw ceph-mon ceph-osd ceph-common"
if ! command -v radosgw > /dev/null || ! command -v ceph-mon > /dev/null || ! command -v ceph-osd > /dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    # shellcheck disable=SC2086
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $ceph > /dev/null; } ||
      echo "Left out: Ceph's gateway; the messages of apt-get above say why" >&2
  else
    echo "Left out: Ceph's gateway (Debian: apt-get install --no-install-recommends $ceph)" >&2
  fi
fi
