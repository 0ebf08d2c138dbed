#!/bin/bash
#SBATCH --job-name=cartpole/0007-brisk-otter
#SBATCH --output=/scratch/me/runs/cartpole/0007-brisk-otter/logs/job-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@600
#SBATCH --time=1-00:00:00
#SBATCH --account=abc
#SBATCH --qos=normal
#SBATCH --exclude=node7
#SBATCH --mail-type=END
#SBATCH --mail-user=me@example.org
#SBATCH --partition=gpu
#SBATCH --constraint=a100|h100
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=1
#SBATCH --mem=32G
#SBATCH --tmp=100G

# Run cartpole/0007-brisk-otter, profile cluster. It can also be submitted by hand.
module load anaconda3
source "$HOME/venv/bin/activate"
set -uo pipefail
export PYTHONUNBUFFERED=1
export WANDB_MODE=offline
export NOTE='it'"'"'s $HOME; rm -rf'
export TILTYARD_PROFILE=cluster TILTYARD_RUNS=/scratch/me/runs

run=/scratch/me/runs/cartpole/0007-brisk-otter
id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
id=${id:-$SLURM_JOB_ID}
# The time limit, for agents that Slurm does not signal in time.
: "${SLURM_JOB_END_TIME:=$(SLURM_TIME_FORMAT=%s squeue -h -j "$id" -o %e)}"
export SLURM_JOB_END_TIME

# One agent on every node. Signals are for the agents; this shell ignores them and waits.
srun --ntasks=1 --ntasks-per-node=1 --cpus-per-task=8 --cpu-bind=none --kill-on-bad-exit=0 \
  python3.11 -m tiltyard.slurm.node_agent "$run" &
agents=$!
trap 'scancel --signal=TERM "$id" 2>/dev/null' TERM INT  # srun itself would kill them at once
trap : USR2
while wait "$agents"; code=$?; kill -0 "$agents" 2>/dev/null; do :; done

# The verdict of the first node's agent, if it belongs to this start of the job.
read -r of restart verdict 2>/dev/null <"$run/job/verdict"
[ "${of:-} ${restart:-}" = "$id ${SLURM_RESTART_COUNT:-0}" ] || verdict=none
echo "job $id: ${verdict:-none} (exit code $code)"
# Ended while saving: by the time limit, or by scancel?
[ "${verdict:-}" = late ] && [ "$(squeue -h -j "$id" -o %r)" = TimeLimit ] && verdict=requeue
[ "${verdict:-none}" = requeue ] || exit "$code"
scontrol requeue "$id" && exit 0
echo "job $id cannot be requeued; submitting the same script again"
again=$(conf=${SLURM_CONF-}
  unset "${!SLURM_@}" "${!SBATCH_@}"
  [ -z "$conf" ] || export SLURM_CONF="$conf"
  sbatch --parsable "$run/job/script.sh") || { echo "continue with: tiltyard resume $run"; exit 1; }
echo "${again%%;*}" >"$run/job/submitted-again"
echo "job ${again%%;*} continues the run"
