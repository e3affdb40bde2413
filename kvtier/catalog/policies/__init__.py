"""The built-in eviction policies, a module each; :mod:`kvtier.catalog` registers them under their names.

Parts of them: ``ghosts``, ``rings``, ``sketch``, ``visits`` and ``returns``. Their interface is that of
plugins: :mod:`kvtier.catalog.eviction`.
"""
