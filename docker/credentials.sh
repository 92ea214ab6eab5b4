#!/bin/sh
# Makes the deployment's secrets once, as files in a volume that only its containers mount: credentials of the object
# store, in the forms that its server and its clients read. Nothing secret is in the environment or in a command line.
# usage: credentials.sh DIRECTORY
set -eu
umask 027
cd "$1"
if [ -f aws_credentials ]; then
  echo "credentials are there"
  exit 0
fi
key=$(od -An -N10 -tx1 /dev/urandom | tr -d ' \n')
secret=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
cat > s3.json <<JSON
{"identities": [{"name": "millrace", "credentials": [{"accessKey": "$key", "secretKey": "$secret"}],
                 "actions": ["Admin", "Read", "Write", "List"]}]}
JSON
printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' "$key" "$secret" > aws_credentials.new
mv aws_credentials.new aws_credentials # last: where it is, everything is
echo "credentials are made"
