"""Runs as jobs of a cluster: submitted, looked after on the nodes, followed and stopped.

RUN/job/
  script.sh         what was submitted; works by hand too: sbatch RUN/job/script.sh
  task.json         what the node agent has to know of the profile, and changed settings for its first attempt
  secrets.sh        variables of the profile whose names say secret, readable by the user alone
  verdict           by the agent: JOB RESTART WORD; the script acts on it, outside of any container
  counts.json       requeues so far, and jobs in a row that came no further
  submitted-again   by the script, where requeue is forbidden: the id of the job that goes on
  stop              somebody typed `tiltyard stop`, or a sweep ends the run early

Trials of a sweep are tasks of one job, SWEEP/slurm/array-0001/, which has the script and the secrets instead:
  trials            the folders' names, a line each: task 0 is the first
  number            the job's, as soon as it is submitted
  forgotten         it was never submitted, and never will be
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
JOB_VARIABLE = "TILTYARD_JOB"  # in a trial's job: its folder in the sweep's
