#!/usr/bin/env bash
# The base images that the builds and the compose file name, for machines that can reach a Debian mirror but no image
# registry: what can be pulled is pulled, the rest is made from Debian's packages and tagged locally. Never push them.
# Exit code 3 where the package mirrors do not have what an image is made of; every other failure is 1.
# usage: tests/compose/base_images.sh [IMAGE...]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

have() { docker image inspect "$1" >/dev/null 2>&1; }
obtain() { have "$1" || timeout 20 docker pull --quiet "$1" >/dev/null 2>&1; }

made_by() { # COMMAND...: its exit code; 3 if it says that the mirrors lack something
  "$@" 2>"$work/said" && return
  cat "$work/said" >&2
  ! grep -qE "does not have a Release file|Unable to locate package|has no installation candidate" "$work/said" || exit 3
  exit 1
}

debian_image() { # SUITE IMAGE
  # The host's bundle goes along, so that pip trusts what the host trusts (a proxy that inspects TLS, for example).
  mmdebstrap --quiet --variant=minbase --include=ca-certificates \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook="copy-in ${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt} /etc/ssl/certs" \
    --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*' \
    "$1" - | docker import --change 'CMD ["bash"]' - "$2" >/dev/null
}

debian() { # SUITE
  local image=debian:$1-slim
  obtain "$image" && return
  echo "making $image from Debian's packages"
  made_by debian_image "$1" "$image"
}

redis() {
  obtain redis:7.2-bookworm && return
  debian bookworm
  echo "making redis:7.2-bookworm from Debian's redis-server"
  cat >"$work/entrypoint.sh" <<'SH'
#!/bin/sh
set -e
case "$1" in -* | *.conf) set -- redis-server "$@" ;; esac
exec "$@"
SH
  chmod +x "$work/entrypoint.sh"
  cat >"$work/Dockerfile" <<'DOCKER'
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/* \
 && mkdir -p /data && chown redis:redis /data
COPY entrypoint.sh /usr/local/bin/docker-entrypoint.sh
VOLUME /data
WORKDIR /data
EXPOSE 6379
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["redis-server"]
DOCKER
  made_by docker build --quiet --tag redis:7.2-bookworm "$work" >/dev/null
}

for image in "${@:-all}"; do
  case "$image" in
    debian:bookworm-slim) debian bookworm ;;
    debian:trixie-slim) debian trixie ;;
    redis:7.2-bookworm) redis ;;
    all) debian bookworm && debian trixie && redis ;;
    *) echo "Error: no recipe for $image" >&2; exit 2 ;;
  esac
done
