"""Stages that execute the four events, on a shared :class:`~kvtier.pipeline.hierarchy.Hierarchy`."""
