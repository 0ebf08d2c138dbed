"""Checks of this machine, or of every node of a profile. Each check yields a finding: one line of the report.

finding.py     one line of the report               checkup.py     all checks of one machine, in order
software.py    Python, packages, torch, GPUs        system.py      cores, memory, limits, ports, clock
storage.py     runs, temporary folders, leftovers   display.py     display and OpenGL; opengl.py queries the driver
slurm.py       what the site's Slurm allows         bad_nodes.py   nodes found bad, until they pass again
nodes.py       a short job that checks the nodes    node_probe.py  the process that it starts on each of them
"""
