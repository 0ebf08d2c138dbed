#!/usr/bin/env bash
# A real, temporary Slurm cluster on one machine, for tests. It starts in less than a second.
#
#   mini_slurm.sh up     DIR [options]   start the cluster in DIR, or its missing parts
#   mini_slurm.sh down   DIR [--wipe]    stop every process of it (--wipe: empty DIR too)
#   mini_slurm.sh status DIR             print daemons and nodes; exit 0 only if all are up
#   mini_slurm.sh env    DIR             print "export SLURM_CONF=..." for eval
#   mini_slurm.sh kill-node  DIR NODE    kill slurmd and the jobs of NODE with SIGKILL
#   mini_slurm.sh start-node DIR NODE    start a killed NODE again
#   mini_slurm.sh restart-ctld DIR       stop and start slurmctld (state is kept)
#
# Options of "up" (remembered in DIR/etc/mini.env, so a later "up DIR" needs none):
#   --nodes N      number of virtual compute nodes, node1..nodeN        [3]
#   --cpus N       CPUs each node claims (may exceed the real ones)     [4]
#   --mem MB       memory each node claims                              [4000]
#   --gpus N       fake GPUs per node (scheduling only)                 [0]
#   --mode MODE    plain | netns                                        [plain]
#   --port N       TCP port of slurmctld; plain nodes use N+1..N+nodes  [first free]
#   --conf FILE    extra lines for slurm.conf ("Key=Value"; replaces our own value, except PartitionName,
#                  which adds a partition)
#   --no-cpu-mem   do not track memory (SelectTypeParameters=CR_Core)
#   --speed N      let slurmctld's clock run N times as fast (libfaketime): time limits,
#                  --signal and requeue delays then pass in 1/N of the time          [1]
#   --fresh        forget earlier jobs and logs (job ids start at 1 again)
#
# plain: all slurmd processes share network and PIDs and differ only by port
#        (Debian builds Slurm with MULTIPLE_SLURMD).  Needs no privileges: run it as
#        any user, who is then SlurmUser and the only user who can run jobs.
#        `hostname` and the IP address are the same on all "nodes".
# netns: every slurmd has its own network, PID, mount, IPC and UTS namespace
#        with its own host name, IP address, /dev/shm and /tmp/ray.  Needs root.
#        Programs that expect one instance per host (Ray) then run unchanged.
#
# Everything is below DIR (conf, key, logs, state, pids); nothing in /etc or /var is
# read or written.  Packages: slurmctld slurmd slurm-client munge (+ iproute2 for netns).
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
umask 022

die()  { echo "mini_slurm: $*" >&2; exit 1; }
info() { echo "mini_slurm: $*" >&2; }

[[ $# -ge 2 ]] || { sed -n '2,34p' "$0" | sed 's/^# \{0,1\}//'; exit 2; }
CMD=$1; shift
mkdir -p "$1" 2>/dev/null || true
DIR=$(cd "$1" 2>/dev/null && pwd -P) || die "no such directory: $1"; shift
[[ $DIR != / && $DIR != *[[:space:]]* ]] || die "DIR must not be / nor hold blanks"
ETC=$DIR/etc RUN=$DIR/run LOG=$DIR/log
CONF=$ETC/slurm.conf SOCK=$RUN/munge.sock
# A unix socket path holds at most 107 bytes; slurmstepd makes DIR/spool/nodeN/nodeN_ID.STEP
[[ ${#DIR} -le 60 ]] || die "DIR is too long (${#DIR} > 60 characters) for unix sockets: $DIR"
TAG=$(printf %s "$DIR" | cksum | awk '{printf "%05x", $1 % 1048576}')  # names this cluster

# ---------------------------------------------------------------- processes
# A pid file holds "PID STARTTIME": a reused pid is never mistaken for ours.  Zombies count
# as dead (in containers pid 1 may reap late or never).
start_time() {  # start_time PID -> clock ticks since boot; fails if gone or zombie
    local s; s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    s=${s##*) }; set -- $s
    [[ $1 != Z && $1 != X ]] || return 1
    echo "${20}"
}
record()  { echo "$2 $(start_time "$2" || echo 0)" > "$RUN/$1.pid"; }
pid_of()  {  # pid_of NAME -> prints the pid if the same process is still running
    local p t; [[ -r $RUN/$1.pid ]] && read -r p t < "$RUN/$1.pid" || return 1
    [[ $(start_time "$p") == "$t" ]] && echo "$p"
}
wait_gone() {  # wait_gone PID SECONDS
    local i; for ((i = 0; i < $2 * 20; i++)); do start_time "$1" >/dev/null || return 0; sleep 0.05; done
    return 1
}
stop_one() {  # stop_one NAME [SECONDS]: TERM, then KILL
    local p; if p=$(pid_of "$1"); then
        kill -TERM "$p" 2>/dev/null || true
        wait_gone "$p" "${2:-5}" || { kill -KILL "$p" 2>/dev/null || true; wait_gone "$p" 5 || true; }
    fi
    rm -f "$RUN/$1.pid"
}
launch() {  # launch NAME CMD...: own session, no inherited stdio or lock fd
    local name=$1; shift
    setsid "$@" </dev/null >"$LOG/$name.out" 2>&1 9>&- &
    local p=$!
    record "$name" "$p"
}
# Kill what jobs left behind, optionally on one node only.  First every slurmstepd that has
# our slurmd log open (its environment cannot be read: its title overwrites it),
# then every process with the environment of a job of this cluster, even one that became
# a daemon and so escaped Slurm (proctrack/linuxproc follows parent pids only).
sweep_jobs() {
    local node=${1:-} f p found round
    for round in 1 2 3; do
        found=0
        for p in $(find /proc/[0-9]*/fd -maxdepth 1 -lname "$LOG/slurmd-${node:-*}.log" 2>/dev/null \
                   | cut -d/ -f3 | sort -u); do
            [[ $(cat "/proc/$p/comm" 2>/dev/null) == slurmstepd* ]] || continue
            kill -KILL "$p" 2>/dev/null && found=1 || true
        done
        for f in $(grep -lszxF "SLURM_CLUSTER_NAME=mini$TAG" /proc/[0-9]*/environ 2>/dev/null); do
            p=${f#/proc/}; p=${p%/environ}
            [[ $p != "$$" && $p != "$PPID" ]] || continue
            grep -qsz '^SLURM_JOB_ID=' "$f" || continue
            [[ -z $node ]] || grep -qszxF "SLURMD_NODENAME=$node" "$f" || continue
            start_time "$p" >/dev/null || continue
            kill -KILL "$p" 2>/dev/null && found=1 || true
        done
        ((found)) || break
    done
}

# ---------------------------------------------------------------- configuration
port_free() { ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
find_port() {  # NODES+1 consecutive free ports; the first one tried depends on DIR
    local base=$((20000 + 0x$TAG % 400 * 25)) i tries
    for ((tries = 0; tries < 200; tries++, base += 25)); do
        ((base < 32000)) || base=20000
        for ((i = 0; i <= NODES; i++)); do port_free $((base + i)) || continue 2; done
        echo $base; return
    done
    die "no free ports"
}
find_subnet() {  # 198.18.0.0/15 is reserved for benchmarks: no clash with real networks
    local x=$((0x$TAG % 254 + 1)) i
    for ((i = 0; i < 254; i++, x = x % 254 + 1)); do
        ip -4 route show | grep -q "^198\.18\.$x\." || { echo "198.18.$x"; return; }
    done
    die "no free subnet"
}
set_conf() {  # set_conf KEY VALUE: replace or append a line of slurm.conf
    if grep -qi "^$1=" "$CONF"; then sed -i "s|^$1=.*|$1=$2|I" "$CONF"; else echo "$1=$2" >> "$CONF"; fi
}
write_conf() {
    local me i gres="" ctl_addr=127.0.0.1 param=CR_Core_Memory
    me=$(id -un)
    [[ $MODE == plain ]] || ctl_addr=$SUBNET.254
    ((TRACKMEM)) || param=CR_Core
    ((GPUS == 0)) || gres="Gres=gpu:$GPUS"
    cat > "$CONF" <<EOF
# written by mini_slurm.sh - do not edit, use --conf
ClusterName=mini$TAG
SlurmctldHost=localhost($ctl_addr)
SlurmctldPort=$PORT
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it may start again (default 120)
AuthInfo=socket=$SOCK,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$RUN/slurmctld.slurm.pid
SlurmdPidFile=$RUN/slurmd-%n.slurm.pid
SlurmctldLogFile=$LOG/slurmctld.log
SlurmdLogFile=$LOG/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
# one text line per finished job, in place of sacct
JobCompType=jobcomp/filetxt
JobCompLoc=$LOG/jobcomp.log
SelectType=select/cons_tres
SelectTypeParameters=$param
# claim more CPUs than the machine has
SlurmdParameters=config_overrides
# 1: a node set DOWN by hand stays down until RESUME, one that was just silent comes back
ReturnToService=1
# the shortest useful timings; time limits are still checked only every 30 s (hard-coded)
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
KillWait=3
CompleteWait=0
SlurmctldTimeout=$((10 * SPEED))
SlurmdTimeout=$((10 * SPEED))
InactiveLimit=0
WaitTime=0
UnkillableStepTimeout=15
# finished jobs stay visible to scontrol/squeue -t all for an hour
MinJobAge=$((3600 * SPEED < 65000 ? 3600 * SPEED : 65000))
MaxJobCount=5000
MaxArraySize=1001
JobRequeue=1
EOF
    # Listen on loopback only.  Slurm then binds to the address of our host name, so
    # this works only if that is 127.0.0.1; otherwise it listens on all interfaces, and
    # only munge protects it.
    if [[ $MODE == plain && $(getent ahostsv4 "$(hostname)" 2>/dev/null | awk 'NR==1{print $1}') == 127.0.0.1 ]]; then
        echo "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny" >> "$CONF"
    fi
    ((GPUS == 0)) || echo "GresTypes=gpu" >> "$CONF"
    # without a default a job would get all the memory of its node, so one job per node
    ((!TRACKMEM)) || echo "DefMemPerCPU=$((MEM / CPUS / 2 > 0 ? MEM / CPUS / 2 : 1))" >> "$CONF"
    if [[ -n $EXTRA ]]; then
        local key val; while IFS='=' read -r key val; do
            [[ -z $key || $key == \#* || $key == PartitionName ]] || set_conf "$key" "$val"
        done < "$EXTRA"
    fi
    echo "NodeName=DEFAULT CPUs=$CPUS RealMemory=$MEM $gres State=UNKNOWN" >> "$CONF"
    for ((i = 1; i <= NODES; i++)); do
        if [[ $MODE == plain ]]; then
            echo "NodeName=node$i NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((PORT + i))"
        else
            echo "NodeName=node$i NodeAddr=$SUBNET.$((i + 10)) Port=6818"
        fi
    done >> "$CONF"
    echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP" >> "$CONF"
    [[ -z $EXTRA ]] || grep '^PartitionName=' "$EXTRA" >> "$CONF" || true
    if ((GPUS)); then
        # File= must be a character device (or a link to one) that ends in its number; only
        # then does Slurm set CUDA_VISIBLE_DEVICES
        for ((i = 0; i < GPUS; i++)); do
            mkdir -p "$DIR/dev"; ln -sfn /dev/null "$DIR/dev/nvidia$i"
        done
        echo "NodeName=node[1-$NODES] Name=gpu Flags=nvidia_gpu_env File=$DIR/dev/nvidia[0-$((GPUS - 1))]" > "$ETC/gres.conf"
    else
        rm -f "$ETC/gres.conf"
    fi
    {
        echo "127.0.0.1 localhost"; echo "::1 localhost ip6-localhost"
        [[ $MODE == plain ]] || {
            echo "$ctl_addr ctl $(hostname)"
            for ((i = 1; i <= NODES; i++)); do echo "$SUBNET.$((i + 10)) node$i"; done
        }
    } > "$ETC/hosts"
}
save_env() {
    { for v in NODES CPUS MEM GPUS MODE PORT SUBNET TRACKMEM EXTRA SPEED; do printf '%s=%q\n' "$v" "${!v}"; done; } > "$ETC/mini.env"
}
load_env() { [[ -r $ETC/mini.env ]] || return 1; . "$ETC/mini.env"; }

# ---------------------------------------------------------------- network (netns mode)
BR=msl$TAG
net_up() {
    ip link show "$BR" >/dev/null 2>&1 || ip link add "$BR" type bridge
    ip addr show dev "$BR" | grep -q "$SUBNET.254/" || ip addr add "$SUBNET.254/24" dev "$BR"
    ip link set "$BR" up
}
net_down() { ip link show "$BR" >/dev/null 2>&1 && ip link del "$BR" || true; }

# The first process (pid 1) of a virtual node.  A shell, so that orphans are reaped.
write_init() {
    cat > "$ETC/node-init.sh" <<'EOF'
#!/usr/bin/env bash
# node-init.sh DIR NODE ADDR: runs as pid 1 of the node's namespaces
set -eu
DIR=$1 NODE=$2 ADDR=$3
hostname "$NODE"
mount --bind "$DIR/etc/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir -p "$DIR/nodes/$NODE/tmp_ray"
chmod 1777 "$DIR/nodes/$NODE/tmp_ray"
mount --bind "$DIR/nodes/$NODE/tmp_ray" /tmp/ray
ip link set lo up
n=0; until ip link show eth0 >/dev/null 2>&1; do
    n=$((n + 1)); [ $n -lt 300 ] || { echo "no eth0"; exit 1; }; sleep 0.02
done
ip addr add "$ADDR/24" dev eth0
ip link set eth0 up
trap 'kill -TERM $slurmd 2>/dev/null' TERM INT
slurmd -D -N "$NODE" -f "$DIR/etc/slurm.conf" &
slurmd=$!
# "wait" returns early when the trap runs; leave only when slurmd is really gone
while kill -0 $slurmd 2>/dev/null; do wait $slurmd || true; done
EOF
}

# ---------------------------------------------------------------- start
start_munge() {
    pid_of munged >/dev/null && return
    rm -f "$SOCK" "$SOCK.lock"
    [[ -s $ETC/munge.key ]] || { (umask 077; head -c 128 /dev/urandom > "$ETC/munge.key"); }
    chmod 600 "$ETC/munge.key"
    # --force: ignore the permissions of the directories above DIR
    launch munged munged --foreground --force --key-file="$ETC/munge.key" --socket="$SOCK" \
        --pid-file="$RUN/munged.own.pid" --log-file="$LOG/munged.log" --seed-file="$RUN/munged.seed"
    local i; for ((i = 0; i < 100; i++)); do [[ -S $SOCK ]] && return; sleep 0.05; done
    die "munged did not come up: $(tail -n 3 "$LOG/munged.out" "$LOG/munged.log" 2>/dev/null)"
}
start_ctld() {
    pid_of slurmctld >/dev/null && return
    local pre=()
    if ((SPEED != 1)); then
        local lib; for lib in /usr/lib/*/faketime/libfaketimeMT.so.1 /usr/lib*/faketime/libfaketimeMT.so.1; do
            [[ -e $lib ]] && break; done
        [[ -e $lib ]] || die "--speed needs libfaketime: apt-get install libfaketime"
        # only the controller, which counts time limits; clients then show odd elapsed times
        pre=(env LD_PRELOAD="$lib" FAKETIME="+0 x$SPEED" FAKETIME_DONT_FAKE_MONOTONIC=1)
    fi
    SLURM_CONF=$CONF launch slurmctld "${pre[@]}" slurmctld -D -f "$CONF"
}
start_node() {
    local n=$1 p i; pid_of "$n" >/dev/null && return
    export SLURM_CONF=$CONF
    mkdir -p "$DIR/spool/$n"
    if [[ $MODE == plain ]]; then
        launch "$n" slurmd -D -N "$n" -f "$CONF"
    else
        [[ -d /tmp/ray ]] || mkdir -m 1777 /tmp/ray   # only a mount point for that of the node
        launch "$n" unshare --net --mount --uts --ipc --pid --fork --kill-child=KILL --mount-proc \
            bash "$ETC/node-init.sh" "$DIR" "$n" "$SUBNET.$((${n#node} + 10))"
        p=$(pid_of "$n") || die "$n did not start: $(cat "$LOG/$n.out")"
        for ((i = 0; i < 200; i++)); do   # until it has left our network namespace
            [[ $(readlink "/proc/$p/ns/net") != "$(readlink /proc/self/ns/net)" ]] && break; sleep 0.02
        done
        ip link del "v$TAG${n#node}" 2>/dev/null || true
        ip link add "v$TAG${n#node}" type veth peer name eth0 netns "$p"
        ip link set "v$TAG${n#node}" master "$BR" up
    fi
}
kill_node() {  # like a power failure: the controller is not notified
    local n=$1 p c
    if p=$(pid_of "$n"); then
        if [[ $MODE == netns ]]; then   # killing pid 1 of the namespace kills all its processes
            for c in $(cat "/proc/$p/task/$p/children" 2>/dev/null); do kill -KILL "$c" 2>/dev/null || true; done
        fi
        kill -KILL "$p" 2>/dev/null || true; wait_gone "$p" 5 || true
    fi
    [[ $MODE == netns || ${2:-} == nosweep ]] || sweep_jobs "$n"
    rm -f "$RUN/$n.pid" "$DIR/spool/$n/${n}_"*
}
wait_ready() {  # counts seconds, not tries: with a dead controller each sinfo takes long
    local n=0 end=$((SECONDS + 30)); export SLURM_CONF=$CONF
    while ((SECONDS < end)); do
        n=$(timeout 5 sinfo -h -N -o '%N %t' 2>/dev/null | sort -u | awk '$2 ~ /^(idle|mix|alloc|comp)$/' | wc -l) || n=0
        [[ $n -ge $NODES ]] && return 0
        pid_of slurmctld >/dev/null || die "slurmctld died: $(tail -n 5 "$LOG/slurmctld.log")"
        sleep 0.1
    done
    die "only $n of $NODES nodes are up after 30 s; see $LOG"
}

# ---------------------------------------------------------------- commands
cmd_up() {
    NODES=3 CPUS=4 MEM=4000 GPUS=0 MODE=plain PORT= SUBNET= TRACKMEM=1 EXTRA= SPEED=1
    mkdir -p "$ETC" "$RUN" "$LOG" "$DIR/state" "$DIR/spool" "$DIR/nodes"
    local fresh=0 changed=0; load_env || true
    while (($#)); do case $1 in
        --nodes) NODES=$2; shift;; --cpus) CPUS=$2; shift;; --mem) MEM=$2; shift;;
        --gpus) GPUS=$2; shift;; --mode) MODE=$2; shift;; --port) PORT=$2; shift;;
        --conf) EXTRA=$(readlink -f "$2"); shift;; --no-cpu-mem) TRACKMEM=0;;
        --speed) SPEED=$2; shift;;
        --fresh) fresh=1; shift; continue;;
        *) die "unknown option $1";; esac; changed=1; shift; done
    [[ $MODE == plain || $MODE == netns ]] || die "--mode plain|netns"
    [[ $MODE == plain || $(id -u) == 0 ]] || die "--mode netns needs root"
    local b; for b in munged slurmctld slurmd sinfo; do
        command -v $b >/dev/null || die "$b not found: apt-get install slurmctld slurmd slurm-client munge"; done
    exec 9>"$RUN/lock"; flock -w 60 9 || die "another mini_slurm.sh works on $DIR"
    if pid_of slurmctld >/dev/null; then
        ((!changed)) || die "already up; 'down' first to change options"
    else
        [[ -n $SUBNET || $MODE == plain ]] || SUBNET=$(find_subnet)
        [[ -n $PORT ]] || PORT=$(find_port)
        ((!fresh)) || rm -rf "$DIR/state"/* "$DIR/spool"/* "$LOG"/*
        write_conf; write_init; save_env
    fi
    [[ $MODE == plain ]] || net_up
    start_munge; start_ctld
    local i; for ((i = 1; i <= NODES; i++)); do start_node node$i; done
    wait_ready
    info "up: $NODES nodes, mode $MODE; export SLURM_CONF=$CONF"
}
cmd_down() {
    load_env || { info "nothing in $DIR"; return 0; }
    exec 9>"$RUN/lock"; flock -w 60 9 || die "another mini_slurm.sh works on $DIR"
    local i f n
    stop_one slurmctld 5
    for f in "$RUN"/node*.pid; do
        [[ -e $f ]] || continue; n=$(basename "$f" .pid)
        kill_node "$n" nosweep
    done
    [[ $MODE == netns ]] || sweep_jobs
    stop_one munged 3
    [[ $MODE == plain ]] || { net_down; rmdir /tmp/ray 2>/dev/null || true; }
    rm -f "$SOCK" "$SOCK.lock" "$RUN"/*.slurm.pid
    [[ ${1:-} != --wipe ]] || rm -rf "$ETC" "$RUN" "$LOG" "$DIR/state" "$DIR/spool" "$DIR/nodes" "$DIR/dev"
    info "down"
}
cmd_status() {
    load_env || { info "nothing in $DIR"; return 3; }
    local ok=0 i n p
    for n in munged slurmctld $(for ((i = 1; i <= NODES; i++)); do echo node$i; done); do
        if p=$(pid_of "$n"); then echo "$n: running, pid $p"; else echo "$n: not running"; ok=1; fi
    done
    ((ok)) || { SLURM_CONF=$CONF timeout 10 sinfo -N -o '%N %t %c %m %G %E' || ok=1; SLURM_CONF=$CONF timeout 10 squeue || ok=1; }
    return $ok
}
case $CMD in
    up) cmd_up "$@";;
    down) cmd_down "$@";;
    status) cmd_status;;
    env) load_env || die "not configured"; echo "export SLURM_CONF=$CONF";;
    kill-node) load_env || die "not configured"; kill_node "$1";;
    start-node) load_env || die "not configured"; start_node "$1";;
    restart-ctld) load_env || die "not configured"; stop_one slurmctld 5; start_ctld; wait_ready;;
    *) die "unknown command $CMD";;
esac
