#!/usr/bin/env bash
# A real S3 server for the tests: Ceph RGW on a memstore cluster of one, on loopback, all its state in one folder.
#
#   ceph.sh start DIR PORT MON_PORT    returns once http://127.0.0.1:PORT answers
#   ceph.sh stop DIR                   ends the daemons that DIR's pid files name
#
# Needs Debian's packages radosgw, ceph-mon and ceph-osd. There are two users: testaccess / testsecret, and
# readaccess / readsecret, who sees of the first one's buckets only what a bucket policy shows it.
set -euo pipefail

usage() { sed -n '4,5s/^# *//p' "$0" >&2; exit 2; }

die() { echo "ceph.sh: $1; see the logs in $DIR" >&2; exit 1; }

retry() {  # retry TIMES COMMAND…: until it succeeds, a quarter of a second apart
    local times=$1; shift
    for ((i = 0; i < times; i++)); do "$@" >/dev/null 2>&1 && return; sleep 0.25; done
    return 1
}

write_config() {
    cat >"$CEPH_CONF" <<CONF
[global]
fsid = $FSID
mon_host = [v2:127.0.0.1:$MON_PORT]
public_addr = 127.0.0.1
keyring = $DIR/keyring
run_dir = $DIR
pid_file = $DIR/\$name.pid
admin_socket = $DIR/\$name.asok
log_file = $DIR/\$name.log
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
osd_objectstore = memstore
memstore_device_bytes = 1073741824
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
# By default a monitor does not start on a disk with less than 5 % free. The tests need some MiB.
mon_data_avail_warn = 0
mon_data_avail_crit = 0
paxos_propose_interval = 0.05
paxos_min_wait = 0.01
[mon.a]
mon_data = $DIR/mon
[osd.0]
osd_data = $DIR/osd
[client.rgw]
rgw_frontends = beast endpoint=127.0.0.1:$PORT
rgw_data = $DIR/rgw
rgw_thread_pool_size = 32
CONF
}

write_keys() {
    ceph-authtool --create-keyring "$DIR/keyring" --gen-key -n mon. --cap mon 'allow *'
    ceph-authtool "$DIR/keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *'
    ceph-authtool "$DIR/keyring" --gen-key -n client.rgw --cap mon 'allow rw' --cap osd 'allow rwx'
    ceph-authtool "$DIR/keyring" --gen-key -n osd.0 --cap mon 'allow profile osd' --cap osd 'allow *'
}

start() {
    mkdir -p "$DIR"/{mon,osd,rgw}
    FSID=$(cat /proc/sys/kernel/random/uuid)
    write_config
    write_keys >/dev/null

    monmaptool --create --addv a "[v2:127.0.0.1:$MON_PORT]" --fsid "$FSID" "$DIR/monmap" >/dev/null
    ceph-mon --mkfs -i a --monmap "$DIR/monmap" --keyring "$DIR/keyring"
    ceph-mon -i a
    retry 40 timeout 10 ceph auth import -i "$DIR/keyring" || die "the monitor does not answer"

    local uuid
    uuid=$(cat /proc/sys/kernel/random/uuid)
    ceph osd new "$uuid" 0 >/dev/null
    ceph-osd -i 0 --mkfs --osd-uuid "$uuid" 2>"$DIR/mkfs.log"
    ceph-osd -i 0 2>>"$DIR/mkfs.log"
    osd_up() { ceph osd stat | grep -q '1 up'; }
    retry 80 osd_up || die "the OSD does not come up"

    radosgw -n client.rgw
    retry 240 curl -sf -o /dev/null "http://127.0.0.1:$PORT/" || die "the gateway does not answer"
    for name in test read; do
        radosgw-admin -n client.rgw user create --uid="$name" --display-name="$name" \
            --access-key="${name}access" --secret-key="${name}secret" >/dev/null 2>"$DIR/user-$name.log" \
            || die "cannot create the user $name"
    done
}

stop() {
    shopt -s nullglob
    for file in "$DIR"/*.pid; do
        kill -9 "$(cat "$file")" 2>/dev/null || true  # their data is in their memory: there is nothing to save
    done
}

[[ $# -ge 2 ]] || usage
DIR=$2
export CEPH_CONF=$DIR/ceph.conf
case "$1-$#" in
    start-4) PORT=$3 MON_PORT=$4; start ;;
    stop-2) stop ;;
    *) usage ;;
esac
