"""Runs as jobs of a cluster: submitted, looked after on the nodes, followed and stopped.

RUN/job/
  script.sh         what was submitted; works by hand too: sbatch RUN/job/script.sh
  task.json         what the node agent has to know of the profile, and changed settings for its first attempt
  secrets.sh        variables of the profile whose names say secret, readable by the user alone
  verdict           by the agent: JOB RESTART WORD; the script acts on it, outside of any container
  counts.json       requeues so far, and jobs in a row that came no further
  submitted-again   by the script, where requeue is forbidden: the id of the job that goes on
  stop              somebody typed `tiltyard stop`
"""

FOLDER = "job"
SCRIPT = "script.sh"
TASK = "task.json"
SECRETS = "secrets.sh"
VERDICT = "verdict"
STOP = "stop"
COUNTS = "counts.json"
AGAIN = "submitted-again"
