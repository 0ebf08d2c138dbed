#!/bin/bash
#SBATCH --job-name=cartpole/sweep-0001/array-0002-1f3a9c02
#SBATCH --output=/scratch/me/runs/cartpole/sweep-0001/slurm/array-0002/%a.out
#SBATCH --open-mode=append
#SBATCH --array=0-29%4
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=4:00:00
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4

# Trials cartpole/sweep-0001/array-0002-1f3a9c02, profile cluster. One can also be submitted by hand: sbatch --array=TASK script.sh
trial=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" /scratch/me/runs/cartpole/sweep-0001/slurm/array-0002/trials)
exec >>/scratch/me/runs/cartpole/sweep-0001/"$trial/logs/job-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.out" 2>&1
set -uo pipefail
export PYTHONUNBUFFERED=1
. /scratch/me/runs/cartpole/sweep-0001/slurm/array-0002/secrets.sh
[ -z "${LD_PRELOAD:-}" ] || { echo "LD_PRELOAD=$LD_PRELOAD is unset because it breaks Ray (slurm.keep_ld_preload: true keeps it)"; unset LD_PRELOAD; }
export TILTYARD_PROFILE=cluster TILTYARD_RUNS=/scratch/me/runs

array=/scratch/me/runs/cartpole/sweep-0001/slurm/array-0002 sweep=/scratch/me/runs/cartpole/sweep-0001
run=$sweep/$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$array/trials")
id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
id=${id:-$SLURM_JOB_ID}
[ ! -e "$array/forgotten" ] || exit 0
[ -s "$array/number" ] || echo "$SLURM_ARRAY_JOB_ID" >"$array/.$id"
[ ! -e "$array/.$id" ] || mv "$array/.$id" "$array/number"
export TILTYARD_JOB="slurm/${array##*/}"
# The time limit, for agents that Slurm does not signal in time.
: "${SLURM_JOB_END_TIME:=$(SLURM_TIME_FORMAT=%s squeue -h -j "$id" -o %e)}"
export SLURM_JOB_END_TIME
( umask 077; exec 9>>"$sweep/slurm/pause"; flock -w 600 9; sleep 2.5 )

while of=; do
# One agent on every node. Signals are for the agents; this shell ignores them and waits.
srun --ntasks=1 --ntasks-per-node=1 --cpus-per-task=4 --cpu-bind=none --kill-on-bad-exit=0 \
  /opt/venv/bin/python -m tiltyard.slurm.node_agent "$run" &
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
[ "${verdict:-none}" = requeue ] && break
# A tick of the sweep decides what comes next; it may be this trial again.
/opt/venv/bin/python -m tiltyard.sweep.tick "$sweep" --own "$run"
[ $? = 10 ] || exit "$code"
done
scontrol requeue "$id" && exit 0
echo "job $id cannot be requeued; submitting the same script again"
task=$SLURM_ARRAY_TASK_ID
again=$(conf=${SLURM_CONF-}
  unset "${!SLURM_@}" "${!SBATCH_@}"
  [ -z "$conf" ] || export SLURM_CONF="$conf"
  sbatch --parsable --array="$task" "$array/script.sh") || { echo "continue with: tiltyard resume $run"; exit 1; }
echo "${again%%;*}_$task" >"$run/job/submitted-again"
echo "job ${again%%;*}_$task continues the run"
