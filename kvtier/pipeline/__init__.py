"""Stages that execute the four events, one each, on a shared :class:`~kvtier.pipeline.base.Hierarchy`."""
