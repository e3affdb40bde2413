"""The estimate in plain English, for the command line and the controller's page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.observability.whatif.report import Change, Report, TierCurve, gained_fast
from kvtier.units import format_size

MIN_SAMPLED = 1000
"""Chunks in the sample, below which the estimate is called unreliable."""
MIN_POINTS = 0.1
"""Percentage points of the hit rate, below which a change is not worth a sentence."""
MIN_FAST_POINTS = 1.0
"""The same for hits that only become faster, because a lower tier has the chunks as well."""
MAX_CHANGES = 8
"""Changes with a sentence of their own, over all tiers."""
MIN_EXCESS = 1.25
"""Capacity divided by useful capacity, from which a tier is called too large."""
MAX_DIFFERENCE = 5.0
"""Percentage points between the measured and the estimated hit rate, above which it is called inexact."""

MIN_BEHIND_SECONDS = 10.0
"""How long a lookup may wait to be observed without a sentence."""

DISABLED = "The estimate is switched off: set `whatif.enabled` to true, and restart the cache process."
NOTHING_OBSERVED = "Nothing has been observed yet: no engine has looked up a chunk since the process started."
NOTHING_REPORTED = (
    "The instance has not reported an estimate: it has observed nothing yet, or `whatif.enabled` is false."
)
UNRELIABLE = f"That is too little for a reliable estimate: wait for {MIN_SAMPLED:,} chunks in the sample."

_UNITS = (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0), ("second", 1.0))
_GPU_UNITS = (("GPU hour", 3600.0), ("GPU minute", 60.0), ("GPU second", 1.0))


def basis(report: Report) -> list[str]:
    """Return what the estimate is based on: what was observed, its sample, and how well it fits."""
    return list(_basis(report))


def findings(report: Report) -> list[str]:
    """Return what the operator could change, the most useful first, then which tiers are too large.

    Empty as long as the sample is too small: see :func:`basis`.
    """
    if report.sampled < MIN_SAMPLED:
        return []
    found = [sentence(change, report) for change in worthwhile(report)]
    if not found:
        found.append(f"No change that was tried would gain {MIN_POINTS} points of hit rate.")
    return [*found, *(text for curve in report.tiers if (text := excess(curve)) is not None)]


def worthwhile(report: Report) -> list[Change]:
    """Return the changes that gain enough for a sentence, in their order: :data:`MAX_CHANGES` at most."""

    def gains(change: Change) -> bool:
        loses = 100 * change.gained <= -MIN_POINTS
        faster = not loses and 100 * (_gained_fast(change, report) or 0.0) >= MIN_FAST_POINTS
        return faster or 100 * change.gained >= MIN_POINTS

    return [change for change in report.changes if gains(change)][:MAX_CHANGES]


def sentence(change: Change, report: Report) -> str:
    """Return what a change would bring: ``"+50GiB of ram: +7.0 points, saves 31 GPU minutes a day"``."""
    effect = f"{_points(change.gained)} points"
    if change.gpu_seconds_a_day:
        verb = "saves" if change.gpu_seconds_a_day > 0 else "costs"
        effect += f", {verb} {_amount(abs(change.gpu_seconds_a_day), _GPU_UNITS)} a day"
    fast = _gained_fast(change, report)
    if fast is not None and 100 * abs(fast - change.gained) >= MIN_FAST_POINTS:
        effect += f", {_points(fast)} points of hits in {change.tier} or faster"
    if change.policy is not None:
        return f"{change.tier} with policy {change.policy}: {effect}"
    if change.codec is not None:
        return f"{change.tier} with codec {change.codec}, if its KV is bfloat16: {effect}"
    capacity = change.capacity_bytes or 0
    curve = _curve_of(change, report)
    if curve is None:
        return f"{change.tier} of {format_size(capacity)}: {effect}"
    added = capacity - curve.capacity_bytes
    return f"{'-' if added < 0 else '+'}{format_size(abs(added))} of {change.tier}: {effect}"


def excess(curve: TierCurve) -> str | None:
    """Return that a tier is too large; ``None`` if it is not, or if no capacity of it is useful."""
    if not curve.useful_bytes:
        return f"{curve.tier} brings nothing: without it, the hit rate would be almost the same."
    times = curve.capacity_bytes / curve.useful_bytes
    if times < MIN_EXCESS:
        return None
    least = min((point.capacity_bytes for point in curve.points), default=0)
    at_least = "at least " if curve.useful_bytes <= least else ""
    useful = format_size(curve.useful_bytes)
    return (
        f"{curve.tier} is {at_least}{times:.1f} times larger than useful: {useful} would do almost as well."
    )


def hit_rates(report: Report) -> str:
    """Return the measured hit rate and the estimated ones, which differ by tier if they are inexact."""
    rates = sorted({f"{100 * curve.hit_rate:.1f}" for curve in report.tiers}, key=float)
    estimated = f"{' to '.join(dict.fromkeys((rates[0], rates[-1])))} %" if rates else "unknown"
    measured = report.measured_hit_rate
    known = "not measured yet" if measured is None else f"{100 * measured:.1f} % measured"
    return f"Hit rate of these chunks: {known}, {estimated} estimated."


def _basis(report: Report) -> Iterator[str]:
    if report.stopped:
        yield f"Nothing is observed any more, because of an error: {report.stopped}"
    sample = f"{_share(report.sampling)} of all keys, {report.sampled:,} chunks"
    observed = f"{report.chunks:,} chunks, {_part(report.observed)} of those looked up"
    yield f"Observed for {_amount(report.seconds)}: {observed}. The sample: {sample}."
    yield f"The estimate takes {_share(report.cpu_share)} of one core."
    yield hit_rates(report)
    if report.sampled < MIN_SAMPLED:
        yield UNRELIABLE
    measured = report.measured_hit_rate
    if measured is not None and any(
        100 * abs(curve.hit_rate - measured) > MAX_DIFFERENCE for curve in report.tiers
    ):
        yield f"These differ by more than {MAX_DIFFERENCE:g} points: the estimate is inexact."
    if report.dropped:
        yield f"{report.dropped:,} lookups were not observed, because the estimate could not keep up."
    if report.behind_seconds >= MIN_BEHIND_SECONDS:
        behind = _amount(report.behind_seconds)
        yield f"It is {behind} behind the lookups: the sample gets smaller until it keeps up."
    if report.prefill_tokens_per_second is None:
        yield "No engine has reported its speed of prefill yet: GPU time is unknown."


def _curve_of(change: Change, report: Report) -> TierCurve | None:
    return next((curve for curve in report.tiers if curve.tier == change.tier), None)


def _gained_fast(change: Change, report: Report) -> float | None:
    """Return what a change adds to the hits in its tier and faster ones; ``None`` if that is unknown."""
    curve = _curve_of(change, report)
    if curve is None or change.capacity_bytes is None:
        return None
    return gained_fast(curve, change.capacity_bytes)


def _points(gained: float) -> str:
    return f"{round(100 * gained, 1) + 0.0:+.1f}"  # Never -0.0.


def _amount(seconds: float, units: Sequence[tuple[str, float]] = _UNITS) -> str:
    """Return a duration in the largest unit not above it, with two digits: ``"2.2 hours"``."""
    unit, length = next(((name, each) for name, each in units if seconds >= each), units[-1])
    number = seconds / length
    text = f"{number:,.0f}" if number >= 9.95 else f"{number:.1f}".removesuffix(".0")
    return f"{text} {unit}{'' if text == '1' else 's'}"


def _part(part: float) -> str:
    """Return a percentage. Only all is 100 %."""
    return _share(part if part == 1 else min(part, 0.999))


def _share(part: float) -> str:
    return f"{100 * part:.3g} %"
