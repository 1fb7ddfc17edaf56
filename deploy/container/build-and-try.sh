#!/usr/bin/env bash
# Builds all images, builds the demo model's artifacts in one, and serves them from the others as a cluster would:
# read-only root, no capability, no new privileges, a user that is not root. Takes about five minutes.
#
#   deploy/container/build-and-try.sh                      with docker, else podman
#   ENGINE=podman deploy/container/build-and-try.sh --build-arg TORCH_BACKEND=index    arguments are for the builds
#
# RUN_FLAGS: more flags for `run`, such as "--network host". PORT: a free one, by default 18080.
set -euo pipefail
cd "$(dirname "$0")/../.."

engine=${ENGINE:-$(command -v docker podman | head -n 1)}
port=${PORT:-18080}
name=snapcap-try-$$
read -ra run_flags <<<"${RUN_FLAGS:-}"
[[ -n $engine ]] || { echo "neither docker nor podman is installed" >&2; exit 1; }

stop() {
    "$engine" rm --force "$name" >/dev/null 2>&1 || true
    "$engine" volume rm --force "$name" >/dev/null 2>&1 || true
}
trap stop EXIT

run() {
    "$engine" run --name "$name" --read-only --tmpfs /tmp:exec --volume "$name:/var/cache/snapcap" \
        --cap-drop ALL --security-opt no-new-privileges \
        --env SNAPCAP_BUCKETS=1,4 --env SNAPCAP_THREADS=1 --env "SNAPCAP_PORT=$port" "${run_flags[@]}" "$@"
}

get() {
    curl --silent --fail "http://127.0.0.1:$port$1"
}

# expect WHAT PATTERN TEXT
expect() {
    grep -qE "$2" <<<"$3" || { echo "FAILED: $1: $3" >&2; exit 1; }
    echo "ok  $1"
}

for target in server compiled builder; do
    "$engine" build --target "$target" --tag "snapcap-try:$target" "$@" .
done
"$engine" images snapcap-try

run --rm snapcap-try:builder build
run --rm snapcap-try:server explain >/dev/null || { echo "FAILED: the server does not find what the builder made"; exit 1; }

for target in server compiled; do
    echo "$target"
    run --detach --publish "127.0.0.1:$port:$port" "snapcap-try:$target" >/dev/null
    for _ in $(seq 300); do
        get /readyz >/dev/null && break
        sleep 0.2
    done
    expect "ready" '"state":"ready"' "$(get /readyz || "$engine" logs "$name" 2>&1)"
    expect "compiled" '"tier":"aot"' "$(get /startup)"
    for image in models/demo/samples/*.png; do
        caption=$(sed -n "s/.*\"$(basename "$image")\": \"\(.*\)\".*/\1/p" models/demo/samples/captions.json)
        expect "$(basename "$image")" "\"caption\":\"$caption\".*\"backend\":\"aot\"" \
            "$(curl --silent --data-binary "@$image" "http://127.0.0.1:$port/v1/caption")"
    done

    inside=$("$engine" exec "$name" python -c '
import importlib.util, os, shutil
status = dict(line.split(":\t") for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
print("user", os.getuid())
print("capabilities", int(status["CapEff"], 16), "privileges", status["NoNewPrivs"])
print("compilers", [name for name in ("cc", "gcc", "g++", "clang", "pip") if shutil.which(name)])
print("transformers", importlib.util.find_spec("transformers"))
try:
    open("/opt/snapcap/new", "w")
except OSError as error:
    print("root", error.strerror)
')
    expect "not root" '^user 65532$' "$inside"
    expect "no privileges" '^capabilities 0 privileges 1$' "$inside"
    expect "no compiler" '^compilers \[\]$' "$inside"
    expect "no transformers" '^transformers None$' "$inside"
    expect "read-only" '^root Read-only file system$' "$inside"

    get /metrics | grep '^snapcap_process_start_to'
    "$engine" stop --time 20 "$name" >/dev/null
    expect "stops at SIGTERM" '^0$' "$("$engine" inspect --format '{{.State.ExitCode}}' "$name")"
    "$engine" rm --force "$name" >/dev/null
done
