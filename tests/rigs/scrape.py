"""The metrics of one scrape, as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """The metrics of one scrape."""

    def __init__(self, text: str) -> None:
        self.families: dict[str, Metric] = {}
        for family in text_string_to_metric_families(text):
            assert family.name not in self.families, f"duplicate family {family.name}"
            self.families[family.name] = family
        self.series = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """Return the value of one kvtier series."""
        return self.series[f"kvtier_{name}", frozenset(labels.items())]

    def labelled(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the values of a metric by its labels, which are sorted."""
        return {
            tuple(sorted(labels)): value
            for (series, labels), value in self.series.items()
            if series == f"kvtier_{name}"
        }

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the nonzero values of a metric with a single label, by label value."""
        values = self.labelled(name).items()
        return {dict(labels)[label]: value for labels, value in values if value}
