#!/bin/bash
# The startup script of a dropforge TPU VM. At every boot, it runs one container and reports how the container ended.
# A machine that serves after it has trained then runs a server.
#
# The script is the same for every run. Its parameters are metadata of the node, set by platforms/tpu_vm/train.py:
#
#   dropforge-role              train: run one attempt once | serve: run a server, at every boot
#   dropforge-run               the run's id
#   dropforge-attempt           the attempt's number; 0 for a server
#   dropforge-image             the container's image: REGISTRY/PATH/NAME@sha256:DIGEST
#   dropforge-env               the container's environment: one NAME=VALUE per line. Of secrets only the names, in
#                               DROPFORGE_SECRETS: the container reads the values itself
#   dropforge-deadline          Unix seconds: the container is stopped then, if it still runs
#   dropforge-runs-bucket       the bucket for log and status: machines/RUN/attempt-N/{startup.log,status.json},
#                               or machines/RUN/serve/... for a server that does not stay up
#   dropforge-run-key           the run's key, which proves that a status and an event are about this run
#                               (functions/dropforge/run/proof.py); or absent
#   dropforge-access-url        the function that gives this machine access to the objects of its run, or absent: then
#                               the machine's account has it
#   dropforge-access-request    what the function wants to know: JSON with the run and its proof
#   dropforge-job-events-topic  projects/P/topics/T: gets an event when the container could not publish its end; or empty
#   dropforge-data-disk         the data disk's device name; empty: the boot disk is used
#   dropforge-server-image      the server's image, run after training once the run's record says DEPLOYING; or absent
#   dropforge-server-env        the server's environment, as above
#   dropforge-server-deadline   Unix seconds: the server is stopped then, and the script waits no longer for DEPLOYING
#
# The disk is mounted at /work in the container. For the exit codes in REPORTED, the container has published its end
# itself; this script publishes any other end. Reference: https://cloud.google.com/tpu/docs/run-in-container

set -Eeuo pipefail
trap finish EXIT # first: every failure from here on is reported
trap on_term TERM
trap 'failed_command=$BASH_COMMAND' ERR

readonly REPORTED=' 0 64 65 66 70 75 76 ' # functions/dropforge/platforms/training.py
readonly STOP_SECONDS=25                  # of the 30 s that a preempted machine has
readonly KILL_SECONDS=10                  # after the deadline
readonly OFF_SECONDS=1800                 # after the deadline; the control plane normally deletes the machine long before
readonly LOG_BYTES=8388608
readonly TOLD_ENDS=3 # a server that has ended three times does not stay up
readonly LOOK_SECONDS=3 # between two reads of the run's record
ROOT=${DROPFORGE_ROOT:-} # the directory that stands for /, when the script runs on a shared machine (local stack)
METADATA="http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1"
STORAGE=${STORAGE_EMULATOR_HOST:-https://storage.googleapis.com}
PUBSUB=${CLOUDSDK_API_ENDPOINT_OVERRIDES_PUBSUB:-https://pubsub.googleapis.com/}

step=begin       # the current step, for the report
error_class=code # dropforge.base.errors.ErrorClass of a failure in this step
reason=''        # why the step failed, if that is known
hint=''
failed_command=''
terminated='' # set by SIGTERM, and when a container ends while the machine shuts down
exit_code=''  # the container's
oom_killed=''
run='' attempt='' role='' bucket='' topic='' job='' run_key='' access_url='' access_request=''
state=$ROOT/run/dropforge # until the data disk is mounted
log=$ROOT/var/log/dropforge.log

main() {
    mkdir -p "$state" "${log%/*}"
    exec > >(trap '' TERM && exec tee -a "$log") 2>&1
    read_metadata
    bound_life
    prepare_disk
    if [ "$role" = train ]; then
        train
        if [ -z "$server_image" ]; then return; fi
        conclude 0
        if ! is_wanted; then return; fi
        become_server
    fi
    serve
}

train() {
    if [ -e "$state/DONE" ]; then
        echo "this attempt ended before the machine was rebooted; reporting its end again"
        return
    fi
    start_container
    explain_exit
}

# Run the server until the machine or the deadline ends.
serve() {
    local ends
    start_container
    for ((ends = 1; ; ends++)); do
        if [ -n "$terminated" ]; then exit 1; fi # the machine ends: its server has not failed, and does not start again
        if [ "$ends" = "$TOLD_ENDS" ]; then report_ends; fi
        sleep "$((ends < TOLD_ENDS ? ends : 10))"
        run_container
    done
}

start_container() {
    rm -f "$state/status.json" "$state/event.json"
    pull_image
    read_environment
    run_container
}

# Wait until the run's record decides whether this machine serves. Succeeds if it does.
is_wanted() {
    local word
    while [ "$(date +%s)" -lt "$server_deadline" ]; do
        word=$(api GET "$STORAGE/storage/v1/b/$bucket/o/runs%2F$run%2Frecord.json?alt=media" | word_of_record) || word=
        case $word in
        serve) return 0 ;;
        end) return 1 ;;
        esac
        sleep "$LOOK_SECONDS"
    done
    return 1
}

word_of_record() {
    python3 -c 'import json, sys
record, attempt = json.load(sys.stdin), int(sys.argv[1])
states = {entered["state"] for entered in record["history"]}
is_latest = record["attempts"][-1]["number"] == attempt
is_over = states & {"TEARING_DOWN", "SUCCEEDED", "FAILED", "CANCELLED"}
print("serve" if is_latest and "DEPLOYING" in states else "end" if is_over or not is_latest else "wait")' "$attempt"
}

# The training container has ended, so the chips and the disk are free.
become_server() {
    role=serve attempt=0 image=$server_image environment=$server_environment deadline=$server_deadline
    topic='' exit_code=''
    state=${state%/*}/$(kind)
    mkdir -p "$state"
    echo "run $run: serve"
}

read_metadata() {
    step=metadata error_class=infrastructure
    identify
    image=$(attribute dropforge-image)
    environment=$(optional dropforge-env)
    deadline=$(attribute dropforge-deadline)
    disk=$(optional dropforge-data-disk)
    server_image=$(optional dropforge-server-image)
    if [ -n "$server_image" ]; then
        server_environment=$(attribute dropforge-server-env)
        server_deadline=$(attribute dropforge-server-deadline)
    fi
    echo "run $run, attempt $attempt: $role on $(metadata instance/name)"
}

# Turn the machine off after the deadline, in case the control plane no longer exists. Best effort, at each boot.
bound_life() {
    local last=${server_deadline:-$deadline} minutes
    minutes=$(((last + OFF_SECONDS - $(date +%s)) / 60))
    shutdown -P "+$((minutes > 1 ? minutes : 1))" "dropforge: nobody has deleted this machine" || true
}

# Read the metadata that a report needs.
identify() {
    bucket=$(attribute dropforge-runs-bucket)
    topic=$(optional dropforge-job-events-topic)
    role=$(attribute dropforge-role)
    attempt=$(attribute dropforge-attempt)
    run_key=$(optional dropforge-run-key)
    access_url=$(optional dropforge-access-url)
    access_request=$(optional dropforge-access-request)
    run=$(attribute dropforge-run)
}

prepare_disk() {
    step=disk error_class=infrastructure
    local data=$ROOT/var/lib/dropforge device
    if [ -n "$disk" ]; then
        data=$ROOT/mnt/dropforge
        mkdir -p "$data"
        if ! mountpoint -q "$data"; then
            device=$(find_disk)
            format_if_blank "$device"
            mount -o discard "$device" "$data"
        fi
    fi
    work=$data/work
    state=$data/state/$run/$(kind)
    mkdir -p "$work" "$state"
}

# Print the data disk's device: the disk of that name or, where disks have no names, the only disk that is not in use.
find_disk() {
    local candidate found count tries
    for ((tries = 0; tries < 60; tries++)); do
        if [ -e "$ROOT/dev/disk/by-id/google-$disk" ]; then
            readlink -f "$ROOT/dev/disk/by-id/google-$disk"
            return
        fi
        count=0
        for candidate in $(lsblk --noheadings --paths --nodeps --exclude 7 --output NAME); do
            if ! lsblk --noheadings --output MOUNTPOINT "$candidate" | grep -q /; then
                found=$candidate count=$((count + 1))
            fi
        done
        if [ "$count" = 1 ]; then
            echo "$found"
            return
        fi
        sleep 1
    done
    echo "data disk $disk did not appear" >&2
    return 1
}

# blkid exits with 2 for an empty disk. After any other error the disk is not formatted.
format_if_blank() {
    local code=0
    blkid --probe "$1" || code=$?
    case $code in
    0) echo "$1 has a file system already" ;;
    2) mkfs.ext4 -q -m 0 -E lazy_itable_init=0,lazy_journal_init=0,discard "$1" ;;
    *) fail infrastructure "the content of the data disk $1 is unknown (blkid: exit code $code), so it was not formatted" ;;
    esac
}

pull_image() {
    step=pull error_class=transient
    local output tries
    export DOCKER_CONFIG=$ROOT/run/dropforge/docker # in memory
    mkdir -p "$DOCKER_CONFIG"
    for ((tries = 1; ; tries++)); do # Docker may not have started yet
        if output=$(pull_once 2>&1); then
            echo "$output"
            return
        fi
        echo "$output"
        case $output in
        *"not found"* | *"manifest unknown"* | *"invalid reference"*)
            output=${output##*$'\n'}
            fail config "image $image does not exist: ${output:0:500}" "deploy again, so that the images are built" ;;
        *denied* | *nauthorized* | *orbidden*)
            fail permission "image $image may not be pulled" "grant the machine's account artifactregistry.reader" ;;
        esac
        if [ "$tries" = 3 ]; then
            fail transient "image $image could not be pulled: ${output:0:500}"
        fi
        sleep "$((tries * 5))"
    done
}

pull_once() {
    token | docker login --username oauth2accesstoken --password-stdin "https://${image%%/*}" &&
        docker pull --quiet "$image"
}

# The container's variables stay arguments of Docker. None becomes a variable of this script, under whatever name.
read_environment() {
    local line
    arguments=()
    while IFS= read -r line; do
        if [ -n "$line" ]; then arguments+=(--env "$line"); fi
    done <<<"$environment"
}

run_container() {
    step=container error_class=code
    local left
    left=$((deadline - $(date +%s)))
    if [ "$left" -le 0 ]; then
        fail deadline "the deadline was over before the container could start"
    fi
    docker rm --force dropforge >/dev/null 2>&1 || true # of an earlier boot
    timeout --preserve-status --kill-after="$KILL_SECONDS" "$left" \
        docker run --name dropforge --privileged --network host --shm-size 16g --volume "$work:/work" \
        --stop-timeout "$STOP_SECONDS" ${arguments[@]+"${arguments[@]}"} "$image" &
    job=$!
    while
        exit_code=0
        wait "$job" || exit_code=$?
        kill -0 "$job" 2>/dev/null # a signal has interrupted the wait; the job still runs
    do :; done
    job='' oom_killed=''
    read_end
    if is_stopping; then terminated=yes; fi
    docker rm --force dropforge >/dev/null 2>&1 || true
    echo "the container ended with exit code $exit_code"
}

# Whether the machine shuts down, as before a preemption. systemd then stops Docker, and Docker this container within its
# --stop-timeout. This script gets no signal: its unit has KillMode=process, and only the program that runs it ends
# (https://github.com/GoogleCloudPlatform/guest-agent, google-startup-scripts.service).
is_stopping() {
    [ "$(systemctl is-system-running 2>/dev/null)" = stopping ]
}

# Docker knows the exit code for certain. Bash does not: `wait` answers 143, or even -1, where the container ends at the
# same time as a SIGTERM reaches this script.
read_end() {
    local status code killed
    read -r status code killed < <(
        docker inspect --format '{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}' dropforge 2>/dev/null
    ) || return 0 # Docker did not create the container: the exit code is that of docker run
    if [ "$status" = exited ]; then exit_code=$code oom_killed=$killed; fi
}

# Report the end of a container that has not reported it itself.
explain_exit() {
    if [[ $REPORTED == *" $exit_code "* ]]; then
        return 0
    fi
    if [ "$(date +%s)" -ge "$deadline" ]; then
        fail deadline "the container was stopped at the deadline"
    fi
    if [ "$oom_killed" = true ]; then
        fail out_of_memory "the machine's memory ran out: a process was killed (exit code $exit_code)" \
            "take a larger accelerator_type, whose machine has more memory, or a smaller batch"
    fi
    case $exit_code in
    125) fail infrastructure "the container could not be started" ;;
    137 | 143) fail infrastructure "the container was killed (exit code $exit_code)" ;;
    *) fail code "the container ended with exit code $exit_code without a report" ;;
    esac
}

# Report a server that does not stay up. It is started again, because a restart may be enough.
report_ends() {
    reason="the server has ended $TOLD_ENDS times, the last time with exit code $exit_code; the end of its log:
$(tail -n 4 "$log")"
    reason=${reason:0:1500}
    if [ "$oom_killed" = true ]; then error_class=out_of_memory; fi
    note_end "$exit_code"
    report
}

on_term() {
    terminated=yes
    if [ -z "$job" ]; then exit 1; fi
    docker stop --time "$STOP_SECONDS" dropforge >/dev/null 2>&1 &
}

# fail ERROR_CLASS MESSAGE [HINT]
fail() {
    error_class=$1 reason=$2 hint=${3-}
    echo "$step: $reason" >&2
    exit 1
}

finish() {
    local code=$?
    trap - EXIT ERR
    trap '' TERM
    set +e
    docker rm --force dropforge >/dev/null 2>&1
    if [ -z "$run" ]; then identify; fi
    if [ -z "$run" ] || [ -z "$attempt" ] || [ -z "$bucket" ]; then
        echo "step $step failed with exit code $code; without the node's metadata the end cannot be reported"
        return
    fi
    if [ "$role" = serve ] && [ -n "$terminated" ]; then
        return
    fi
    mkdir -p "$state" || state=$(mktemp -d)
    conclude "$code"
}

# Write the end down, unless that was done before a reboot, and report it.
conclude() {
    if [ ! -e "$state/DONE" ]; then
        note_end "$1"
    fi
    report
}

# Write the end down, so that the machine can report it after a reboot.
note_end() {
    if [ -z "$reason" ]; then
        reason="step $step failed with exit code $1: ${failed_command:-unknown command}"
    fi
    local event=
    if [[ $role = serve || -z $exit_code || $REPORTED != *" $exit_code "* ]]; then
        event=failed
        if [ -n "$terminated" ]; then event=preempted; fi
    fi
    compose status >"$state/status.json"
    if [ -n "$event" ]; then compose event >"$state/event.json"; fi
    if [ "$role" = train ]; then touch "$state/DONE"; fi
    sync "$state"/* "$state"
}

report() {
    echo "reporting: $(cat "$state/status.json")"
    if [ -e "$state/event.json" ] && [ -n "$topic" ]; then
        api POST "${PUBSUB%/}/v1/$topic:publish" "@$state/event.json" || echo "the event could not be published"
        echo
    fi
    upload status.json "@$state/status.json" application/json
    tail -c "$LOG_BYTES" "$log" | upload startup.log @- text/plain
}

# upload NAME @FILE CONTENT_TYPE
upload() {
    local object
    object=$(object "$1")
    api POST "$STORAGE/upload/storage/v1/b/$bucket/o?uploadType=media&name=${object//\//%2F}" "$2" "$3" >/dev/null ||
        echo "$object could not be written"
}

# The name of a file of this machine in the bucket.
object() {
    echo "machines/$run/$(kind)/$1"
}

# The status, or the request that publishes the event, as JSON: schemas/job_event.schema.json. The key is a variable of
# this Python alone, and never an argument.
compose() {
    run=$run attempt=$attempt step=$step error_class=$error_class reason=$reason hint=$hint exit_code=$exit_code \
        event=$event run_key=$run_key object=$(object status.json) python3 - "$1" <<'EOF'
import base64, datetime, hmac, json, os, sys, time

value = os.environ.get
now = datetime.datetime.now(datetime.timezone.utc).isoformat()
run, attempt, kind = value("run"), int(value("attempt")), value("event")
code = value("exit_code")


def proof(name, content):
    """functions/dropforge/run/proof.py"""
    return hmac.new(value("run_key").encode(), f"{name}\n".encode() + content, "sha256").hexdigest()


if sys.argv[1] == "status":
    reported = not kind
    status = {
        "run": run,
        "attempt": attempt,
        "time": now,
        "step": value("step"),
        "exit_code": int(code) if code else None,
        "error_class": None if reported else "preempted" if kind == "preempted" else value("error_class"),
        "message": "" if reported else value("reason"),
    }
    if value("run_key"):
        canonical = json.dumps(status, sort_keys=True, separators=(",", ":")).encode()
        status["proof"] = proof(value("object"), canonical)
    print(json.dumps(status))
    sys.exit()
sequence = time.time_ns() // 1000000
event = {"type": kind, "run": run, "attempt": attempt, "sequence": sequence, "time": now}
if kind == "failed":
    event.update(error_class=value("error_class"), message=value("reason")[:4000], hint=value("hint", "")[:1000])
attributes = {
    "ce-specversion": "1.0",
    "ce-id": f"{run}/{attempt}/{sequence}",
    "ce-source": f"//dropforge.dev/runs/{run}",
    "ce-type": f"dev.dropforge.job.{kind}",
    "ce-subject": run,
    "ce-time": now,
    "content-type": "application/json",
}
content = json.dumps(event).encode()
if value("run_key"):
    attributes["proof"] = proof("job-event", content)
data = base64.b64encode(content).decode()
print(json.dumps({"messages": [{"data": data, "attributes": attributes}]}))
EOF
}

# What the machine is used for, as a part of names.
kind() {
    if [ "$role" = serve ]; then echo serve; else echo "attempt-$attempt"; fi
}

attribute() {
    metadata "instance/attributes/$1"
}

# An attribute, or nothing where there is none.
optional() {
    local code=0
    attribute "$1" || code=$?
    [ "$code" = 0 ] || [ "$code" = 22 ]
}

metadata() {
    persist curl --silent --show-error --fail --retry 8 --retry-connrefused --max-time 10 \
        --header 'Metadata-Flavor: Google' "$METADATA/$1"
}

# persist COMMAND...: a curl, again when its connection breaks; --retry is for answers and time-outs alone, and
# --retry-all-errors for what is not there as well.
persist() {
    local answer code pause
    for pause in 1 2 4 0; do
        code=0
        answer=$("$@") || code=$?
        case $code in
        35 | 52 | 55 | 56) sleep "$pause" ;; # in the handshake, before an answer, in the request, in the answer
        *) break ;;
        esac
    done
    printf '%s' "$answer"
    return "$code"
}

token() {
    metadata instance/service-accounts/default/token | access_token
}

access_token() {
    python3 -c 'import json, sys; print(json.load(sys.stdin)["access_token"])'
}

# The token for a URL: the run's own for Cloud Storage, and the account's for everything else.
token_for() {
    case $access_url:$1 in
    ?*:"$STORAGE"/storage/* | ?*:"$STORAGE"/upload/storage/*) run_token ;;
    *) token ;;
    esac
}

run_token() {
    local identity
    identity=$(metadata "instance/service-accounts/default/identity?audience=$access_url") || return
    persist ask_access "$identity" | access_token
}

# Neither the identity token nor the proof is in an argument list.
ask_access() {
    curl --silent --show-error --fail-with-body --retry 4 --retry-connrefused --max-time 60 --request POST \
        --header @<(printf 'Authorization: Bearer %s\n' "$1") --header 'Content-Type: application/json' \
        --data-binary @<(printf '%s' "$access_request") "$access_url"
}

# api METHOD URL [@FILE [CONTENT_TYPE]]: the answer's body, also of a refusal.
api() {
    persist api_once "$@"
}

# The token is never in an argument list.
api_once() {
    local header
    header="Authorization: Bearer $(token_for "$2")" || return
    curl --silent --show-error --fail-with-body --retry 4 --retry-connrefused --max-time 30 --request "$1" \
        --header @<(printf '%s\n' "$header") --header "Content-Type: ${4:-application/json}" \
        ${3:+--data-binary "$3"} "$2"
}

main
