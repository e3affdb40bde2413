// The samples that the controller keeps, turned into what charts and totals show.

import { Chart, largest } from "./chart.js";
import { bytes, bytesTick, compact, percent, throughput, timeAxis } from "./format.js";

export const SPANS = { hour: "1 hour", day: "1 day", week: "1 week" };
export const SECONDS = { hour: 3600, day: 86400, week: 7 * 86400 };
/** Seconds of which each point of a hit rate is, at least: as everywhere else. */
const WINDOW = 300;
/** Between two samples, in steps, after which a line is interrupted. */
const GAP = 3.5;

const sum = (values) => Object.values(values).reduce((total, value) => total + value, 0);
export const found = (sample) => sum(sample.hit_tokens);
export const rate = (part, whole) => (whole ? Math.min(1, part / whole) : null);

/** Add up counts of all samples, by name. */
export function totals(samples, of) {
  const total = {};
  for (const sample of samples) for (const [name, value] of Object.entries(of(sample))) total[name] = (total[name] ?? 0) + value;
  return total;
}

/** Return a count of a sample in each second; null for the first sample after a start, which is of no time. */
const each = (value, { seconds }) => (seconds ? value / seconds : null);

/** Return one series for each name: `of(sample)` by name, in each second or at its end. */
function series(samples, of, { gauge = false } = {}) {
  const names = [...new Set(samples.flatMap((sample) => Object.keys(of(sample))))];
  const all = names.map((name) => ({
    name,
    points: samples.map((sample) => [sample.time, gauge ? (of(sample)[name] ?? 0) : each(of(sample)[name] ?? 0, sample)]),
  }));
  return largest(all, ({ points }) => points.reduce((total, [, value]) => total + (value ?? 0), 0));
}

/** The hit rate of the five minutes before each sample, or of a longer sample. */
function hitRates(samples, step) {
  const width = Math.max(1, Math.round(WINDOW / step));
  return samples.map((sample, at) => {
    const window = samples.slice(Math.max(0, at + 1 - width), at + 1).filter(({ time }) => time > sample.time - Math.max(WINDOW, step));
    const looked = window.reduce((total, each) => total + each.looked_up_tokens, 0);
    return [sample.time, rate(window.reduce((total, each) => total + found(each), 0), looked)];
  });
}

const perSecond = (value) => `${compact(value)}/s`;
const faults = ({ outages, corrupt, failed }) => ({ outages, "corrupt chunks": corrupt, "failed transfers": failed });

/** The charts that there are: their texts, and what they show of samples. */
const CHARTS = {
  served: {
    title: "Tokens served, by tier",
    what: "Tokens a second that lookups found, by the tier that held them",
    format: perSecond,
    stacked: true,
    of: (samples) => series(samples, ({ hit_tokens: hits }) => hits),
    empty: "No token was served from a tier.",
  },
  hits: {
    title: "Hit rate",
    what: "Part of the tokens looked up that were found",
    format: percent,
    whole: 1,
    of: (samples, step) => [{ name: "hit rate", tone: 0, points: hitRates(samples, step) }],
    empty: "Nothing was looked up.",
  },
  misses: {
    title: "Missed tokens, by reason",
    what: "Tokens a second that were looked up and not found, by reason",
    format: perSecond,
    stacked: true,
    of: (samples) => series(samples, ({ missed_tokens: misses }) => misses),
    empty: "No reason was reported.",
  },
  saved: {
    title: "GPUs saved",
    what: "How many GPUs would have been computing what was found",
    format: (value) => compact(value),
    of: (samples) => [{ name: "GPUs", tone: 0, points: samples.map((sample) => [sample.time, each(sample.gpu_seconds, sample)]) }],
    empty: "No engine has reported its speed.",
  },
  moved: {
    title: "Throughput, by route",
    what: "Bytes a second between tiers, peers and engines",
    format: throughput,
    base: 1024,
    ticks: (value) => `${bytesTick(value)}/s`,
    of: (samples) => series(samples, ({ moved_bytes: moved }) => moved),
    empty: "Nothing was moved.",
  },
  used: {
    title: "Held, by tier",
    what: "Bytes held, by tier",
    format: bytes,
    base: 1024,
    ticks: bytesTick,
    stacked: true,
    of: (samples) => series(samples, ({ used_bytes: used }) => used, { gauge: true }),
    empty: "Nothing is held.",
  },
  fill: {
    title: "Fill, by tier",
    what: "Fill of each tier",
    format: percent,
    whole: 1,
    of: (samples) => series(samples, (each) => fills(each), { gauge: true }),
    empty: "Nothing is held.",
  },
  faults: {
    title: "Outages and errors",
    what: "Outages, corrupt chunks and failed transfers in each step",
    format: (value) => compact(value),
    of: (samples) => series(samples, faults, { gauge: true }),
    empty: "None.",
  },
  instances: {
    title: "Instances",
    what: "Connected instances",
    format: (value) => compact(value),
    of: (samples) => [{ name: "connected", tone: 0, points: samples.map((each) => [each.time, each.instances]) }],
  },
};

function fills({ used_bytes: used, capacity_bytes: capacity }) {
  return Object.fromEntries(Object.entries(capacity).map(([tier, size]) => [tier, size ? (used[tier] ?? 0) / size : 0]));
}

/** A set of charts of the same samples. */
export class Charts {
  #charts = new Map();

  constructor(node, names) {
    this.node = node;
    for (const name of names) this.#charts.set(name, new Chart({ ...CHARTS[name], x: timeAxis("hour") }));
    node.replaceChildren(...[...this.#charts.values()].map(({ node }) => node));
  }

  show(samples, { span, step, now }) {
    const any = samples.length > 0;
    for (const [name, chart] of this.#charts) {
      chart.x = timeAxis(span);
      const all = CHARTS[name].of(samples, step);
      // Reasons are reported by some versions only.
      chart.node.hidden = name === "misses" && !all.length;
      const quiet = all.every(({ points }) => points.every(([, value]) => !value)) && name !== "hits";
      const gap = GAP * step;
      const empty = any ? CHARTS[name].empty : "The first sample comes within ten seconds.";
      // Shorter while there are samples of a part of the span only.
      const from = Math.max(now - SECONDS[span], Math.min(samples[0]?.time ?? now, now - WINDOW));
      chart.show({ series: quiet ? [] : all, from, to: now, gap, empty });
    }
  }
}
