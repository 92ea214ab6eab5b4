#!/bin/sh
# A real S3 server for the tests: Ceph's RADOS gateway with one monitor and one object daemon, from Debian's packages
#   apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common
# Listens on 127.0.0.1 only, keeps everything in one directory, needs no configuration of the system.
#
#   scripts/s3_server.sh start DIRECTORY [PORT]   starts it (about 20 s), prints the variables for the tests
#   scripts/s3_server.sh stop DIRECTORY           ends the three daemons; the data stays
#
# Then: eval "$(scripts/s3_server.sh start DIRECTORY)" && pytest tests/integration/storage
set -eu

usage() { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
action=$1
dir=$2
port=${3:-7480}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
access_key=millrace
secret_key=millrace-test-secret
conf="$dir/ceph.conf"
keyring="$dir/admin.keyring"

stop() {
    for daemon in rgw osd mon; do
        pid_file="$dir/$daemon.pid"
        [ -s "$pid_file" ] || continue
        pid=$(cat "$pid_file")
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$pid" 2>/dev/null || true
        rm -f "$pid_file"
    done
}

configure() {
    fsid=$(cat /proc/sys/kernel/random/uuid)
    mon_port=$((port + 1))
    cat > "$conf" <<EOF
[global]
fsid = $fsid
mon initial members = a
mon host = v2:127.0.0.1:$mon_port
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail warn = 2
mon data avail crit = 1
osd objectstore = bluestore
bluestore block create = true
bluestore block size = 21474836480
osd memory target = 939524096
run dir = $dir
admin socket = $dir/\$name.asok
log file = $dir/\$name.log
crash dir = $dir
keyring = $keyring
mon data = $dir/mon
osd data = $dir/osd
[mon.a]
pid file = $dir/mon.pid
[osd.0]
pid file = $dir/osd.pid
keyring = $dir/osd/keyring
EOF
}

make_cluster() {
    configure
    rm -rf "$dir/mon" "$dir/osd"
    mkdir -p "$dir/mon" "$dir/osd"
    ceph-authtool --create-keyring "$keyring" --gen-key -n client.admin \
        --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *' >/dev/null
    ceph-authtool --create-keyring "$dir/mon.keyring" --gen-key -n mon. --cap mon 'allow *' >/dev/null
    ceph-authtool "$dir/mon.keyring" --import-keyring "$keyring" >/dev/null
    monmaptool --create --clobber --fsid "$fsid" --addv a "[v2:127.0.0.1:$mon_port]" "$dir/monmap" >/dev/null
    ceph-mon -c "$conf" -i a --mkfs --monmap "$dir/monmap" --keyring "$dir/mon.keyring"
    ceph-mon -c "$conf" -i a
    osd_uuid=$(cat /proc/sys/kernel/random/uuid)
    ceph-authtool --create-keyring "$dir/osd/keyring" --gen-key -n osd.0 >/dev/null
    secret=$(ceph-authtool -p -n osd.0 "$dir/osd/keyring")
    echo "{\"cephx_secret\": \"$secret\"}" |
        ceph -c "$conf" --connect-timeout 15 osd new "$osd_uuid" -i - >/dev/null
    ceph-osd -c "$conf" -i 0 --mkfs --osd-uuid "$osd_uuid" >>"$dir/setup.log" 2>&1
    ceph-osd -c "$conf" -i 0 >>"$dir/setup.log" 2>&1
    radosgw-admin -c "$conf" user create --uid=millrace --display-name=millrace \
        --access-key="$access_key" --secret-key="$secret_key" >>"$dir/setup.log" 2>&1
    touch "$dir/ready"
}

start() {
    for tool in ceph ceph-mon ceph-osd radosgw radosgw-admin monmaptool ceph-authtool; do
        command -v "$tool" >/dev/null || { echo "s3_server.sh: $tool is not installed; see the head of $0" >&2; exit 5; }
    done
    stop
    if [ -e "$dir/ready" ]; then
        ceph-mon -c "$conf" -i a
        ceph-osd -c "$conf" -i 0 >>"$dir/setup.log" 2>&1
    else
        make_cluster
    fi
    radosgw -c "$conf" -n client.admin --keyring "$keyring" --pid-file "$dir/rgw.pid" \
        --rgw-frontends "beast endpoint=127.0.0.1:$port" >>"$dir/setup.log" 2>&1
    for _ in $(seq 600); do
        if python3 -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$port/', timeout=2)" 2>/dev/null; then
            echo "export MILLRACE_TEST_S3_URL='s3://millrace-test?endpoint=http://127.0.0.1:$port&region=us-east-1'"
            echo "export AWS_ACCESS_KEY_ID=$access_key AWS_SECRET_ACCESS_KEY=$secret_key"
            return
        fi
        sleep 0.1
    done
    echo "s3_server.sh: the gateway does not answer on 127.0.0.1:$port within 60 s; see $dir/setup.log" >&2
    stop
    exit 5
}

case $action in
    start) start ;;
    stop) stop ;;
    *) usage ;;
esac
