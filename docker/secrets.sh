#!/bin/sh
# Makes what docker-compose.tls.yml mounts: certificates of an authority of its own, tokens, and the credentials of Redis
# and of the object store. Needs openssl. The directory is closed to other users of this machine; its files are readable,
# because the containers' user is another one. The authority's key (ca.key) is mounted nowhere: keep it elsewhere.
# usage: docker/secrets.sh [DIRECTORY [HOST...]]     default secrets; HOSTs are further names that clients call
#
# What is there and fits is kept, so put your own files there first; delete one, and it is made anew:
#   tls.crt, client.crt         with their keys; needs ca.key. Also made anew if expired, or if ca.crt did not sign them;
#                               what was there is kept as *.old
#   ca.crt, or also ca.key      for the key that is there; both: a new authority
#   client.token                the old one is revoked: `tokens` loses every line that is named `client`
#   redis.conf and redis.url, s3.json and aws_credentials   both of a pair: new secrets; one: it follows the other
# If anything fails, no file has been changed.
set -eu
directory=${1:-secrets}
[ $# = 0 ] || shift
mkdir -p "$directory"
chmod 700 "$directory"
cd "$directory"
days=825 # of certificates; of the authority four times as many

umask 077
work=$(mktemp -d ./.new.XXXXXX)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
new=$work/new # only what is complete is moved into it, and from there to where it is mounted
mkdir "$new"

fail() {
  echo "docker/secrets.sh: $1; nothing was changed" >&2
  exit 1
}
random() { openssl rand -hex "$1"; }
done_with() { # FILE: it is complete
  [ -s "$work/$1" ] || fail "$1 would be empty"
  mv "$work/$1" "$new/$1"
}
now() { # FILE: where it is, made anew or not
  if [ -f "$new/$1" ]; then echo "$new/$1"; else echo "$1"; fi
}
key() { # NAME
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$work/$1" 2>"$work/said" ||
    fail "openssl makes no key: $(cat "$work/said")"
  done_with "$1"
}
fits() { # KEY CERTIFICATE: whether they belong together
  openssl pkey -in "$1" -passin pass: -pubout -out "$work/one" 2>/dev/null &&
    openssl x509 -in "$2" -noout -pubkey >"$work/other" 2>/dev/null && cmp -s "$work/one" "$work/other"
}
problem() { # NAME: why its certificate has to be made anew; nothing if it has not
  if [ ! -s "$1.crt" ] || [ ! -s "$1.key" ]; then
    echo "is not there with its key"
  elif ! openssl verify -CAfile "$(now ca.crt)" -partial_chain -untrusted "$1.crt" "$1.crt" >/dev/null 2>&1; then
    echo "is not signed by ca.crt, or has expired"
  elif ! fits "$1.key" "$1.crt"; then
    echo "is not of $1.key"
  fi
}

authority() {
  if [ -s ca.crt ]; then
    openssl x509 -in ca.crt -noout 2>/dev/null || fail "ca.crt is no certificate"
    return
  fi
  [ -s ca.key ] || key ca.key
  openssl req -x509 -new -key "$(now ca.key)" -passin pass: -subj "/CN=millrace authority" -days "$((days * 4))" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" -out "$work/ca.crt" 2>"$work/said" ||
    fail "openssl makes no ca.crt: $(cat "$work/said")"
  done_with ca.crt
}
leaf() { # NAME USAGE SUBJECT-ALTERNATIVE-NAMES
  why=$(problem "$1")
  [ -n "$why" ] || return 0
  signer=$(now ca.key)
  [ -s "$signer" ] || fail "$1.crt $why, and without the authority's key it cannot be made: put ca.key back here, \
or certificate and key of your own"
  fits "$signer" "$(now ca.crt)" || fail "$1.crt $why, and ca.key, which has to sign it, is not the key of ca.crt, or has a passphrase"
  key "$1.key"
  printf 'basicConstraints=critical,CA:FALSE\nextendedKeyUsage=%s\nsubjectAltName=%s\n' "$2" "$3" >"$work/ext"
  serial=$(random 16)
  openssl req -new -key "$new/$1.key" -subj "/CN=millrace $1" -out "$work/csr" 2>"$work/said" &&
    openssl x509 -req -in "$work/csr" -CA "$(now ca.crt)" -CAkey "$signer" -passin pass: -set_serial "0x$serial" \
      -days "$days" -extfile "$work/ext" -out "$work/$1.crt" 2>"$work/said" ||
    fail "openssl makes no $1.crt: $(cat "$work/said")"
  openssl verify -CAfile "$(now ca.crt)" -partial_chain "$work/$1.crt" >"$work/said" 2>&1 ||
    fail "ca.crt does not sign for the new $1.crt: $(cat "$work/said")"
  done_with "$1.crt"
}

token() { # NAME
  [ ! -s "$1" ] || return 0
  secret=$(random 32)
  printf 'mrt_%s' "$secret" >"$work/$1"
  done_with "$1"
}
tokens() {
  token workers.token
  token client.token
  [ -f "$new/client.token" ] || [ ! -s tokens ] || return 0
  hash=$(tr -d '[:space:]' <"$(now client.token)" | openssl dgst -sha256 -r)
  [ ! -f tokens ] || awk '!(/^sha256:/ && $2 == "client")' tokens >"$work/tokens"
  printf 'sha256:%.64s client\n' "$hash" >>"$work/tokens"
  done_with tokens
}

redis() {
  [ ! -s redis.conf ] || [ ! -s redis.url ] || return 0
  if [ -s redis.conf ]; then
    password=$(sed -n 's/^requirepass  *"*\([^" ]*\)"* *$/\1/p' redis.conf)
  else # the URL of a Redis elsewhere says nothing about the stack's own
    password=$(sed -n 's#^rediss*://[^:@/]*:\([^@]*\)@redis[:/].*#\1#p' redis.url 2>/dev/null || true)
    [ -n "$password" ] || password=$(random 32)
  fi
  case "$password" in
    '' | *[!A-Za-z0-9._~-]*) fail "redis.conf and redis.url: the password of the one that is there cannot be taken over; write both" ;;
  esac
  if [ ! -s redis.conf ]; then
    printf 'requirepass %s\n' "$password" >"$work/redis.conf"
    done_with redis.conf
  fi
  if [ ! -s redis.url ]; then
    printf 'rediss://:%s@redis:6379/0?ssl_ca_certs=/run/secrets/ca.crt\n' "$password" >"$work/redis.url"
    done_with redis.url
  fi
}
store() {
  [ ! -s s3.json ] || [ ! -s aws_credentials ] || return 0
  if [ -s aws_credentials ]; then
    access=$(sed -n 's/^ *aws_access_key_id *= *\([^ ]*\) *$/\1/p' aws_credentials | head -n 1)
    secret=$(sed -n 's/^ *aws_secret_access_key *= *\([^ ]*\) *$/\1/p' aws_credentials | head -n 1)
  elif [ -s s3.json ]; then
    access=$(sed -n 's/.*"accessKey": *"\([^"]*\)".*/\1/p' s3.json | head -n 1)
    secret=$(sed -n 's/.*"secretKey": *"\([^"]*\)".*/\1/p' s3.json | head -n 1)
  else
    access=$(random 10)
    secret=$(random 32)
  fi
  for word in "$access" "$secret"; do
    case "$word" in
      '' | *[!A-Za-z0-9/+=._-]*) fail "s3.json and aws_credentials: the keys of the one that is there cannot be taken over; write both" ;;
    esac
  done
  if [ ! -s s3.json ]; then
    cat >"$work/s3.json" <<JSON
{"identities": [{"name": "millrace", "credentials": [{"accessKey": "$access", "secretKey": "$secret"}],
                 "actions": ["Admin", "Read", "Write", "List"]}]}
JSON
    done_with s3.json
  fi
  if [ ! -s aws_credentials ]; then
    printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' "$access" "$secret" >"$work/aws_credentials"
    done_with aws_credentials
  fi
}

names=DNS:millrace.internal,DNS:orchestrator,DNS:redis,DNS:localhost,IP:127.0.0.1
for host in "$@"; do
  case "$host" in
    *[!0-9.]*) names=$names,DNS:$host ;;
    *) names=$names,IP:$host ;;
  esac
done
authority
leaf tls serverAuth,clientAuth "$names" # every service's
leaf client clientAuth DNS:client       # a person's
tokens
redis
store

for path in "$new"/*; do
  [ -f "$path" ] || continue # none
  name=${path##*/}
  case "$name" in
    tls.* | client.crt | client.key) [ ! -s "$name" ] || cp -p "$name" "$name.old" ;;
  esac
  # One that is there stays the same file, which is what containers mount.
  if [ -f "$name" ]; then cat "$path" >"$name"; else mv "$path" "$name"; fi
  [ "$name" = ca.key ] || chmod 644 "$name"
  echo "made $name"
done
echo "the secrets are in $PWD"
