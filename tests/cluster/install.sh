#!/usr/bin/env bash
# Installs Debian's packages of Slurm, of the shells zsh and fish and of a C compiler, if run as root and with apt-get:
# tests start their own clusters from them, ask the shells for completions, and compile a library that injects faults.
# Nothing is configured or started. Without root or apt-get it prints which tests are skipped.
#
#   install.sh STAMP      STAMP is touched when everything is installed
packages="slurmctld slurmd slurm-client munge libfaketime zsh fish gcc libc6-dev"
export PATH=$PATH:/usr/sbin:/sbin

complete() {
    command -v munged && command -v slurmctld && command -v slurmd && command -v sbatch && command -v zsh && command -v fish &&
        command -v cc &&
        { compgen -G '/usr/lib*/*/faketime/libfaketimeMT.so.1' || compgen -G '/usr/lib*/faketime/libfaketimeMT.so.1'; }
} >/dev/null
skipped() {
    printf '%s\n' "" "================ tests of Slurm jobs (tests/cluster), of failing disks, zsh and fish may be skipped: $1" \
        "                 install by hand: apt-get install --no-install-recommends $packages" "" >&2
    exit 0
}

complete || {
    [ "$(id -u)" = 0 ] || skipped "packages are missing, and only root may install them"
    command -v apt-get >/dev/null || skipped "packages are missing, and there is no apt-get"
    # A policy file keeps apt from starting the daemons; an existing one is not changed.
    policy=/usr/sbin/policy-rc.d
    [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy && trap 'rm -f $policy' EXIT; }
    output=$(apt-get update 2>&1 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages 2>&1) ||
        skipped "apt-get failed: $(tail -n 1 <<<"$output")"
}
touch "$1"
