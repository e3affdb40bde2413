// Small charts of shares over time: lines in a drawing that stretches with its place, words around it in HTML.

import { draw, make, say } from "./dom.js";
import { age, clock, percent } from "./format.js";

const WIDTH = 300;
const HEIGHT = 100;
const SHORTEST = 300;
const LONGEST = 3600;
const MINUTE = 60;

export class Chart {
  #value = make("span", { class: "chart-value numbers" });
  #from = make("span");
  #grid = [0.5, HEIGHT / 2, HEIGHT - 0.5].map((y) => draw("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));
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

  /** `name` is above the chart, `what` says what it shows for those who do not see it. */
  constructor(name, what) {
    this.what = what;
    this.node = make(
      "figure",
      { class: "chart" },
      make("figcaption", {}, make("span", {}, name), this.#value),
      this.#svg,
      make("p", { class: "axis numbers", "aria-hidden": "true" }, this.#from, make("span", {}, "now")),
    );
    this.#svg.addEventListener("pointermove", (event) => this.#point(event));
    this.#svg.addEventListener("pointerleave", () => this.#rest());
  }

  /**
   * Draw `series`, each with a `name`, a `tone` and `points`: [seconds, share from 0 to 1 or null]. A null
   * breaks the line.
   */
  show(series, now) {
    const first = Math.min(now, ...series.map(({ points }) => points[0]?.[0] ?? now));
    this.#series = series;
    this.now = now;
    this.span = Math.min(LONGEST, Math.max(SHORTEST, now - first));
    this.#lines.replaceChildren(...series.flatMap((one) => this.#drawn(one)));
    say(this.#from, `${age(this.span)} ago`);
    this.#svg.setAttribute("aria-label", this.#words());
    this.#rest();
  }

  #x = (time) => WIDTH * (1 - (this.now - time) / this.span);

  /** One line, and the area below it where it is the only one. */
  #drawn({ tone, points }) {
    const runs = [[]];
    for (const [time, share] of points) {
      if (share === null) runs.push([]);
      else if (time >= this.now - this.span) runs.at(-1).push([this.#x(time), HEIGHT * (1 - share)]);
    }
    const drawn = [];
    for (const run of runs.filter((run) => run.length)) {
      // A lone sample is a dot, which a line without length is.
      const line = `M${[...run, ...(run.length > 1 ? [] : run)].map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`;
      const area = `${line}L${run.at(-1)[0].toFixed(1)} ${HEIGHT}L${run[0][0].toFixed(1)} ${HEIGHT}Z`;
      if (this.#series.length === 1) drawn.push(draw("path", { class: `area tone-${tone}`, d: area }));
      drawn.push(draw("path", { class: `line tone-${tone}`, d: line }));
    }
    return drawn;
  }

  /** What the chart shows where nobody points at it: how it is now. */
  #rest() {
    this.#cursor.setAttribute("visibility", "hidden");
    const last = this.#series.map(({ points }) => known(points).at(-1));
    const one = last[0] ? percent(last[0][1]) : "nothing yet";
    say(this.#value, this.#series.length === 1 ? one : "");
  }

  /** What it was at the time that is pointed at. */
  #point(event) {
    const box = this.#svg.getBoundingClientRect();
    const time = this.now - this.span * (1 - (event.clientX - box.left) / box.width);
    const shares = this.#series.flatMap(({ name, points }) => {
      const nearest = closest(known(points), time);
      return nearest ? [`${this.#series.length > 1 ? `${name} ` : ""}${percent(nearest[1])}`] : [];
    });
    if (!shares.length) return;
    this.#cursor.setAttribute("x1", this.#x(time));
    this.#cursor.setAttribute("x2", this.#x(time));
    this.#cursor.setAttribute("visibility", "visible");
    say(this.#value, `${clock(time).slice(0, 5)}  ${shares.join("  ")}`);
  }

  #words() {
    const parts = this.#series.flatMap(({ name, points }) => {
      const shares = known(points).map(([, share]) => share);
      if (!shares.length) return [];
      const [low, high] = [Math.min(...shares), Math.max(...shares)];
      return [`${name} now ${percent(shares.at(-1))}, lowest ${percent(low)}, highest ${percent(high)}`];
    });
    return `${this.what} in the last ${age(this.span)}: ${parts.join("; ") || "nothing yet"}`;
  }
}

const known = (points) => points.filter(([, share]) => share !== null);

function closest(points, time) {
  const off = ([at]) => Math.abs(at - time);
  return points.reduce((best, point) => (best && off(best) <= off(point) ? best : point), null);
}

/** How full each tier that has a capacity has been, one series a tier. */
export function fillSeries(instance) {
  return instance.tiers.flatMap((tier, number) => {
    if (!tier.capacity) return [];
    const points = instance.history.map(({ time, tiers }) => [time, share(tiers[number]?.used, tier.capacity)]);
    return [{ name: tier.name, tone: number % 4, points }];
  });
}

/** Of the chunks that were asked for in the minute before each sample, how many were found. */
export function hitSeries({ history }) {
  const found = (sample) => sample.tiers.reduce((sum, tier) => sum + tier.found, 0);
  const steps = history.slice(1).map((sample, index) => {
    const asked = sample.looked_up - history[index].looked_up;
    // Less than before: the instance has begun anew.
    return asked > 0 ? [sample.time, asked, found(sample) - found(history[index])] : [sample.time, 0, 0];
  });
  let first = 0;
  const points = steps.map(([time], last) => {
    while (steps[first][0] <= time - MINUTE) first += 1;
    const minute = steps.slice(first, last + 1);
    const asked = minute.reduce((sum, step) => sum + step[1], 0);
    return [time, asked ? share(minute.reduce((sum, step) => sum + step[2], 0), asked) : null];
  });
  // Of the first sample it is not known what came before it.
  return [{ name: "hit rate", tone: 0, points: [...history.slice(0, 1).map(({ time }) => [time, null]), ...points] }];
}

const share = (part, whole) => (part === undefined ? null : Math.min(1, Math.max(0, part / whole)));
