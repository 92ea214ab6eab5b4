#!/bin/sh
# Makes what docker-compose.tls.yml mounts: certificates of an authority of its own, tokens, and the credentials of Redis
# and of the object store. What is there already is kept, so put your own files there first, or delete one to have it made
# anew. Needs openssl. The directory is closed to other users of this machine; its files are readable, because the
# containers' user is another one. The authority's key (ca.key) is mounted nowhere: keep it elsewhere.
# usage: docker/secrets.sh [DIRECTORY [HOST...]]     default secrets; HOSTs are further names that clients call
set -eu
directory=${1:-secrets}
[ $# = 0 ] || shift
mkdir -p "$directory"
chmod 700 "$directory"
cd "$directory"
days=825 # of certificates; of the authority four times as many

random() { openssl rand -hex "$1"; }
put() { # FILE: its content from standard input; one that is there stays the same file, which is what containers mount
  cat > "$1.new"
  chmod 644 "$1.new"
  if [ -f "$1" ]; then cat "$1.new" > "$1" && rm "$1.new"; else mv "$1.new" "$1"; fi
}
key() { # FILE
  (umask 077; openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1.new" 2>/dev/null)
  mv -f "$1.new" "$1"
}
leaf() { # NAME USAGE SUBJECT-ALTERNATIVE-NAMES
  [ -f "$1.crt" ] && return
  key "$1.key"
  chmod 644 "$1.key"
  printf 'basicConstraints=critical,CA:FALSE\nextendedKeyUsage=%s\nsubjectAltName=%s\n' "$2" "$3" > "$1.ext"
  openssl req -new -key "$1.key" -subj "/CN=millrace $1" -out "$1.csr"
  openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -set_serial "0x$(random 16)" -days "$days" -extfile "$1.ext" \
    2>/dev/null | put "$1.crt"
  rm -f "$1.csr" "$1.ext"
}
token() {
  printf 'mrt_%s' "$(random 32)"
}

if [ ! -f ca.crt ]; then
  key ca.key
  openssl req -x509 -new -key ca.key -subj "/CN=millrace authority" -days "$((days * 4))" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" | put ca.crt
fi
names=DNS:millrace.internal,DNS:orchestrator,DNS:redis,DNS:localhost,IP:127.0.0.1
for host in "$@"; do
  case "$host" in
    *[!0-9.]*) names=$names,DNS:$host ;;
    *) names=$names,IP:$host ;;
  esac
done
leaf tls serverAuth,clientAuth "$names"      # every service's
leaf client clientAuth DNS:client            # a person's

[ -f workers.token ] || token | put workers.token
if [ ! -f client.token ]; then
  token | put client.token
  { cat tokens 2>/dev/null || true
    printf 'sha256:%s client\n' "$(openssl dgst -sha256 -r client.token | cut -c 1-64)"; } | put tokens
fi
if [ ! -f redis.conf ]; then
  password=$(random 32)
  printf 'requirepass %s\n' "$password" | put redis.conf
  printf 'rediss://:%s@redis:6379/0?ssl_ca_certs=/run/secrets/ca.crt\n' "$password" | put redis.url
fi
if [ ! -f aws_credentials ]; then
  access=$(random 10) secret=$(random 32)
  put s3.json <<JSON
{"identities": [{"name": "millrace", "credentials": [{"accessKey": "$access", "secretKey": "$secret"}],
                 "actions": ["Admin", "Read", "Write", "List"]}]}
JSON
  printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' "$access" "$secret" | put aws_credentials
fi
echo "the secrets are in $PWD"
