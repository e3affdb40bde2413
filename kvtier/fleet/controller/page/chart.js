// Small charts of fractions over time: lines in an SVG that scales with its container, labels in HTML.

import { draw, make, setText } from "./dom.js";
import { age, clock, percent } from "./format.js";

export const WIDTH = 300;
export const HEIGHT = 100;
const MIN_SPAN = 300;
const MAX_SPAN = 3600;
/** Between two samples, after which a line is interrupted: samples are ten seconds apart. */
const GAP = 35;

/** Return the lines at 0, 50 and 100 %. */
export const lines = () =>
  [0.5, HEIGHT / 2, HEIGHT - 0.5].map((y) => draw("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));

export class Chart {
  #value = make("span", { class: "chart-value numbers" });
  #from = make("span");
  #grid = lines();
  #lines = draw("g");
  #cursor = draw("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
  #svg = draw(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
    ...this.#grid,
    this.#lines,
    this.#cursor,
  );
  #series = [];

  /** `name` is the caption; `what` describes the chart to screen readers. */
  constructor(name, what) {
    this.what = what;
    this.node = make(
      "figure",
      { class: "chart" },
      make("figcaption", {}, make("span", {}, name), this.#value),
      this.#svg,
      make("p", { class: "axis numbers", "aria-hidden": "true" }, this.#from, make("span", {}, "now")),
    );
    this.#svg.addEventListener("pointermove", (event) => this.#showAt(event));
    this.#svg.addEventListener("pointerleave", () => this.#showCurrent());
  }

  /**
   * Draw `series`, each with a `name`, a `tone` and `points`: [seconds, fraction from 0 to 1 or null]. A null or
   * a gap interrupts the line.
   */
  show(series, now) {
    const first = Math.min(now, ...series.map(({ points }) => points[0]?.[0] ?? now));
    this.#series = series;
    this.now = now;
    this.span = Math.min(MAX_SPAN, Math.max(MIN_SPAN, now - first));
    this.#lines.replaceChildren(...series.flatMap((each) => this.#paths(each)));
    setText(this.#from, `${age(this.span)} ago`);
    this.#svg.setAttribute("aria-label", this.#description());
    this.#showCurrent();
  }

  #x = (time) => WIDTH * (1 - (this.now - time) / this.span);

  /** Return the paths of a line, and of the area below it if it is the only one. */
  #paths({ tone, points }) {
    const runs = [[]];
    let before = null;
    for (const [time, share] of points) {
      if (share === null || time - before > GAP) runs.push([]);
      before = time;
      if (share !== null && time >= this.now - this.span) runs.at(-1).push([this.#x(time), HEIGHT * (1 - share)]);
    }
    const drawn = [];
    for (const run of runs.filter((run) => run.length)) {
      // A single sample is drawn as a line of length zero, which is a dot.
      const line = `M${[...run, ...(run.length > 1 ? [] : run)].map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`;
      const area = `${line}L${run.at(-1)[0].toFixed(1)} ${HEIGHT}L${run[0][0].toFixed(1)} ${HEIGHT}Z`;
      if (this.#series.length === 1) drawn.push(draw("path", { class: `area tone-${tone}`, d: area }));
      drawn.push(draw("path", { class: `line tone-${tone}`, d: line }));
    }
    return drawn;
  }

  /** Show the current value: the pointer is not on the chart. */
  #showCurrent() {
    this.#cursor.setAttribute("visibility", "hidden");
    const [time, share] = this.#series[0]?.points.at(-1) ?? [0, null];
    const current = share === null || this.now - time > GAP ? "-" : percent(share);
    setText(this.#value, this.#series.length === 1 ? current : "");
  }

  /** Show the values at the time under the pointer. */
  #showAt(event) {
    const box = this.#svg.getBoundingClientRect();
    const time = this.now - this.span * (1 - (event.clientX - box.left) / box.width);
    const shares = this.#series.flatMap(({ name, points }) => {
      const nearest = closest(known(points), time);
      return nearest && Math.abs(nearest[0] - time) <= GAP ? [`${this.#series.length > 1 ? `${name} ` : ""}${percent(nearest[1])}`] : [];
    });
    if (!shares.length) return;
    this.#cursor.setAttribute("x1", this.#x(time));
    this.#cursor.setAttribute("x2", this.#x(time));
    this.#cursor.setAttribute("visibility", "visible");
    setText(this.#value, `${clock(time).slice(0, 5)}  ${shares.join("  ")}`);
  }

  #description() {
    const parts = this.#series.flatMap(({ name, points }) => {
      const shares = known(points).map(([, share]) => share);
      if (!shares.length) return [];
      const [low, high] = [Math.min(...shares), Math.max(...shares)];
      return [`${name} last ${percent(shares.at(-1))}, lowest ${percent(low)}, highest ${percent(high)}`];
    });
    return `${this.what} in the last ${age(this.span)}: ${parts.join("; ") || "no data yet"}`;
  }
}

const known = (points) => points.filter(([, share]) => share !== null);

function closest(points, time) {
  const off = ([at]) => Math.abs(at - time);
  return points.reduce((best, point) => (best && off(best) <= off(point) ? best : point), null);
}

/** The fill of each tier that has a capacity, one series per tier. */
export function fillSeries({ tiers, history, disconnectedAt }, now) {
  return tiers.flatMap((tier, number) => {
    if (!tier.capacity) return [];
    const points = history.map(({ time, tiers: then }) => [time, share(then[number]?.used, tier.capacity)]);
    return [{ name: tier.name, tone: number % 4, points: disconnectedAt ? [...points, [now, null]] : points }];
  });
}

/** The hit rate of the five minutes before each sample, and before now. */
export function hitSeries({ history, hit_rate: current, disconnectedAt }, now) {
  const points = history.map(({ time, hit_rate: rate }) => [time, rate ?? null]);
  return [{ name: "hit rate", tone: 0, points: [...points, [now, disconnectedAt ? null : (current ?? null)]] }];
}

const share = (part, whole) => (part === undefined ? null : Math.min(1, Math.max(0, part / whole)));
