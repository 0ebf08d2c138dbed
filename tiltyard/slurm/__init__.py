"""Runs as Slurm jobs: submit them, run them on the nodes, follow them and stop them.

RUN/job/
  script.sh         the submitted script; also works by hand: sbatch RUN/job/script.sh
  task.json         the profile's settings for the node agent, and overrides for the first attempt
  secrets.sh        the profile's secret environment variables, readable only by the user
  verdict           written by the agent: JOB RESTART OUTCOME; the script acts on it, outside any container
  counts.json       requeues so far, and jobs in a row without progress
  submitted-again   written by the script where requeueing is forbidden: the id of the job that continues the run
  stop              `tiltyard stop` was typed, or a sweep stops the trial early

The trials of a sweep are tasks of an array job. Its folder, SWEEP/slurm/array-0001/, holds script and secrets, and:
  trials            one folder name per line; line 1 is task 0
  number            the array's job id, written on submission
  forgotten         the array was never submitted and never will be
"""

FOLDER = "job"
SCRIPT = "script.sh"
TASK = "task.json"
SECRETS = "secrets.sh"
VERDICT = "verdict"
STOP = "stop"
COUNTS = "counts.json"
RESUBMITTED = "submitted-again"
TRIALS = "trials"
JOB_NUMBER = "number"
NEVER_SUBMITTED = "forgotten"
JOB_VARIABLE = "TILTYARD_JOB"  # in a trial's job: the job's folder, relative to the sweep
