#!/bin/sh
# One monitor, one disk in a file, one gateway, all of it under /data so that a volume keeps it. Credentials come from
# the file that the compose stack makes, in SeaweedFS's form.
set -eu
data=/data
fsid=5a1f0d6c-6d3c-4a38-9a55-0d6f6f3f2b11
osd_uuid=7d0c6a52-2c8e-4a5f-8f7e-5d2f0f2c9a10
# Below 1 % of the disk the monitor ends, and a disk that fills up stops every write: said here rather than waited for.
free=$(df --output=avail -B1M "$data" | tail -n 1)
percent=$((100 - $(df --output=pcent "$data" | tail -n 1 | tr -dc 0-9)))
if [ "$free" -lt 2048 ] || [ "$percent" -lt 2 ]; then
  echo "the disk behind $data has $free MiB ($percent %) left: the store needs 2048 MiB and 2 %" >&2
  exit 1
fi
mkdir -p "$data/mon" "$data/osd" "$data/etc" /etc/ceph /var/run/ceph
cat > /etc/ceph/ceph.conf <<CONF
[global]
fsid = $fsid
mon initial members = a
mon host = [v2:127.0.0.1:3300,v1:127.0.0.1:6789]
mon data = $data/mon
osd data = $data/osd
keyring = $data/etc/admin.keyring
osd pool default size = 1
osd pool default min size = 1
osd pool default pg autoscale mode = off
osd pool default pg num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
auth allow insecure global id reclaim = false
mon data avail warn = 2
mon data avail crit = 1
osd objectstore = bluestore
bluestore block create = true
bluestore block size = 10737418240
osd memory target = 939524096
public addr = 127.0.0.1
cluster addr = 127.0.0.1
[osd]
keyring = $data/osd/keyring
[client.admin]
rgw frontends = beast endpoint=0.0.0.0:8333
CONF
if [ ! -e "$data/mon/made" ]; then
  ceph-authtool --create-keyring "$data/etc/admin.keyring" --gen-key --name client.admin \
    --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *' --cap mds 'allow *' >/dev/null
  ceph-authtool --create-keyring "$data/etc/mon.keyring" --gen-key --name mon. --cap mon 'allow *' >/dev/null
  ceph-authtool "$data/etc/mon.keyring" --import-keyring "$data/etc/admin.keyring" >/dev/null
  monmaptool --create --clobber --fsid "$fsid" --addv a '[v2:127.0.0.1:3300,v1:127.0.0.1:6789]' /run/monmap >/dev/null
  ceph-mon --mkfs --id a --monmap /run/monmap --keyring "$data/etc/mon.keyring"
  touch "$data/mon/made"
fi
ceph-mon --id a
if [ ! -e "$data/osd/ready" ]; then
  secret=$(ceph-authtool --gen-print-key)
  ceph-authtool --create-keyring "$data/osd/keyring" --name osd.0 --add-key "$secret" >/dev/null
  printf '{"cephx_secret": "%s"}' "$secret" | ceph --connect-timeout 30 osd new "$osd_uuid" -i - >/dev/null
  ceph-osd --id 0 --mkfs --osd-uuid "$osd_uuid"
fi
ceph-osd --id 0
credential() {
  python3 -c "import json; print(json.load(open('${S3_CONFIG:-/run/millrace/s3.json}'))['identities'][0]['credentials'][0]['$1'])"
}
radosgw-admin user create --uid=millrace --display-name=millrace \
  --access-key="$(credential accessKey)" --secret-key="$(credential secretKey)" >/dev/null 2>&1 \
  || radosgw-admin user info --uid=millrace >/dev/null
exec radosgw -f --name client.admin --log-to-stderr=true --err-to-stderr=true
