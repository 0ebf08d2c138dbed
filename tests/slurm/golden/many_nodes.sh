#!/bin/bash
#SBATCH --job-name=cartpole/0007-brisk-otter
#SBATCH --output=/scratch/me/runs/cartpole/0007-brisk-otter/logs/job-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=4:00:00
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4

# Run cartpole/0007-brisk-otter, profile cluster. It may be submitted by hand, too.
set -uo pipefail
export PYTHONUNBUFFERED=1
[ -z "${LD_PRELOAD:-}" ] || { echo "LD_PRELOAD=$LD_PRELOAD of this site is unset: it breaks Ray (slurm.keep_ld_preload: true keeps it)"; unset LD_PRELOAD; }
export TILTYARD_PROFILE=cluster TILTYARD_RUNS=/scratch/me/runs

run=/scratch/me/runs/cartpole/0007-brisk-otter
id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
id=${id:-$SLURM_JOB_ID}
# The time limit, for an agent that was not told of it in time.
: "${SLURM_JOB_END_TIME:=$(SLURM_TIME_FORMAT=%s squeue -h -j "$id" -o %e)}"
export SLURM_JOB_END_TIME
export TILTYARD_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)

# One agent on every node. Signals go to the agents; this shell only waits, whatever it is sent.
rm -f "$run/job/verdict"
srun --ntasks=3 --ntasks-per-node=1 --cpus-per-task=4 --cpu-bind=none --kill-on-bad-exit=0 \
  /opt/venv/bin/python -m tiltyard.slurm.node_agent "$run" &
agents=$!
trap 'scancel --signal=TERM "$id" 2>/dev/null' TERM INT  # srun itself would kill them at once
trap : USR2
(until [ -s "$run/job/verdict" ]; do sleep 5; done; sleep 60; kill "$agents" 2>/dev/null) & guard=$!
while wait "$agents"; code=$?; kill -0 "$agents" 2>/dev/null; do :; done
kill "$guard" 2>/dev/null

# What the agent of the first node decided, if it is about this very start of the job.
read -r of restart verdict 2>/dev/null <"$run/job/verdict"
[ "${of:-} ${restart:-}" = "$id ${SLURM_RESTART_COUNT:-0}" ] || verdict=none
echo "job $id: ${verdict:-none} (exit code $code)"
# Ended while it saved: by the limit, or by somebody who does not want it back?
[ "${verdict:-}" = late ] && [ "$(squeue -h -j "$id" -o %r)" = TimeLimit ] && verdict=requeue
[ "${verdict:-none}" = requeue ] || exit "$code"
scontrol requeue "$id" && exit 0
echo "job $id may not be requeued; the same script is submitted again"
again=$(conf=${SLURM_CONF-}
  unset "${!SLURM_@}" "${!SBATCH_@}"
  [ -z "$conf" ] || export SLURM_CONF="$conf"
  sbatch --parsable "$run/job/script.sh") || { echo "go on with: tiltyard resume $run"; exit 1; }
echo "${again%%;*}" >"$run/job/submitted-again"
echo "job ${again%%;*} goes on with it"
