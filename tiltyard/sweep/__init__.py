"""Many runs of one plan: a folder that holds the plan, the settings of each trial, and the trials, which are runs.

    space, optuna_search, early_stopping     which settings to try, and which trials to stop: pure
    preflight, folder, results               a plan checked; its folder; what the trials recorded
    controller, trial_source, retries        trials started, watched and retried; pbt/ for populations
    backends/, tick                          trials as processes here, or as jobs of Slurm or another queue
    report, plots                            summaries

There is no daemon and no database: the process that holds the sweep's lock decides, and may be killed at any moment.
"""
