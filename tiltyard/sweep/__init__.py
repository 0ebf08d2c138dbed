"""Many runs of one plan: a folder that holds the plan, what each trial's settings are, and the trials, which are runs.

    space, search, halving     which settings to try, and who goes on: pure
    prepare, folder            a plan checked, and as a folder
    controller, local          trials started, watched and retried; all that is known is on the disk
    turn, jobs                 the same where trials are jobs, by whoever comes by: arrays (Slurm), template (any other)
    report, pictures           what came out

There is no daemon and no database: whoever holds the sweep's lock decides, and can be killed at any moment.
"""
