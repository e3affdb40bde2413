"""Carries the four events out: one stage for each, all over one :class:`~kvtier.pipeline.base.Hierarchy`."""
