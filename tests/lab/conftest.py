"""The command line of :mod:`tests.cli`."""

from tests.cli.conftest import _clean_environment, kvtier

__all__ = ["_clean_environment", "kvtier"]
