"""``python -m kvtier`` is ``kvtier``, of just this interpreter."""

from kvtier.cli import main

main()
