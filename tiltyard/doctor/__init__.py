"""What a machine has and lacks, as findings: here, or on every node of a profile.

finding.py     one line of the report             checkup.py     all checks of one machine, in order
software.py    Python, packages, torch, GPUs      system.py      cores, limits, ports, clock
storage.py     runs, temporary places, leftovers  display.py     display and OpenGL; opengl.py asks the driver
site.py        what Slurm's settings allow
visit.py       a short job that runs the checkup on nodes         node.py    what it starts on each of them
across.py      what only nodes side by side show                  remembered.py    nodes found bad, until found well
"""
