"""Run the ``kvtier`` command with this interpreter: ``python -m kvtier``."""

from kvtier.cli import main

main()
