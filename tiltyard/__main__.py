"""`python -m tiltyard` is the `tiltyard` command."""

from tiltyard.cli import main

main()
