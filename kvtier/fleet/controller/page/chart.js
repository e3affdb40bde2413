// Charts: lines or a stack over a horizontal axis, with numbers on both axes. The legend shows the values at the
// pointer, or at the cursor that the arrow keys move. Lines in an SVG that scales with its container, text in HTML.

import { draw, make, setText } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 160;
const TICKS = 4;
export const MAX_SERIES = 6;

export class Chart {
  #value = make("span", { class: "chart-at numbers" });
  #legend = make("ul", { class: "legend numbers" });
  #lines = draw("g");
  #grid = draw("g");
  #cursor = draw("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
  #svg = draw(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    this.#grid,
    this.#lines,
    this.#cursor,
  );
  #plot = make("div", { class: "plot", role: "img", tabindex: 0 }, this.#svg);
  #vertical = make("div", { class: "axis-y numbers", "aria-hidden": "true" });
  #horizontal = make("div", { class: "axis-x numbers", "aria-hidden": "true" });
  #spoken = make("p", { class: "hidden", role: "status" });
  #empty = make("p", { class: "chart-empty" });
  #series = [];
  #values = [];
  #at = null;
  #shown = "";

  /**
   * `title` is the caption, `what` describes it to screen readers, `format` formats a value and `ticks` one on the
   * axis, whose units are powers of `base`. `stacked` adds the series up. `whole` is the top of the axis, if it is
   * always the same. `x` formats a position: { tick, full }.
   */
  constructor({ title, what, format, ticks = format, stacked = false, whole = null, base = 1000, x }) {
    Object.assign(this, { title, what, format, ticks, stacked, whole, base, x });
    this.node = make(
      "figure",
      { class: "chart" },
      make("figcaption", {}, make("span", { class: "chart-title" }, title), this.#value),
      make("div", { class: "chart-body" }, this.#vertical, this.#plot, this.#horizontal, this.#empty),
      this.#legend,
      this.#spoken,
    );
    this.#plot.addEventListener("pointermove", (event) => this.#point(event));
    this.#plot.addEventListener("pointerleave", () => this.#moveTo(null));
    this.#plot.addEventListener("blur", () => this.#moveTo(null));
    this.#plot.addEventListener("keydown", (event) => this.#press(event));
  }

  /**
   * Draw `series`, each with a `name`, a `tone` and `points`: [x, value or null]. A null, or a distance of more than
   * `gap`, interrupts a line. `from` and `to` are the ends of the axis, `mark` a position to mark.
   */
  show({ series, from, to, gap = Infinity, empty = "No data yet.", mark = null }) {
    this.#series = series;
    Object.assign(this, { from, to, gap, mark });
    this.#values = [...new Set(series.flatMap(({ points }) => points.filter(([, value]) => value !== null).map(([x]) => x)))].sort((a, b) => a - b);
    const none = !this.#values.length;
    setText(this.#empty, none ? empty : "");
    this.#plot.setAttribute("aria-label", this.#description());
    const highest = Math.max(0, ...this.#stacked().flatMap(({ points }) => points.map(([, , top]) => top ?? 0)));
    this.top = this.whole ?? nice(highest, this.base);
    this.#drawAxes();
    this.#lines.replaceChildren(...this.#stacked().flatMap((each) => this.#paths(each)), ...this.#marked());
    this.#drawLegend();
    this.#moveTo(none ? null : this.#at);
  }

  #x = (x) => (WIDTH * (x - this.from)) / Math.max(1e-9, this.to - this.from);
  #y = (value) => HEIGHT * (1 - Math.min(1, value / this.top));

  /** Return the series with points [x, bottom, top]. */
  #stacked() {
    const below = new Map();
    return this.#series.map((each) => ({
      ...each,
      points: each.points.map(([x, value]) => {
        if (value === null) return [x, null, null];
        const bottom = this.stacked ? (below.get(x) ?? 0) : 0;
        below.set(x, bottom + value);
        return [x, bottom, bottom + value];
      }),
    }));
  }

  /** Return the line of a series, and its area in a stack or if it is the only one. */
  #paths({ tone, points }) {
    const runs = [[]];
    let before = null;
    for (const [x, bottom, top] of points) {
      if (top === null || (before !== null && x - before > this.gap)) runs.push([]);
      before = x;
      if (top !== null && x >= this.from) runs.at(-1).push([this.#x(x), this.#y(bottom), this.#y(top)]);
    }
    return runs.filter((run) => run.length).flatMap((run) => {
      // A single point is drawn as a line of length zero, which is a dot.
      const whole = run.length > 1 ? run : [...run, ...run];
      const line = `M${whole.map(([x, , y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`;
      const back = [...whole].reverse().map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
      const area = draw("path", { class: `area tone-${tone}`, d: `${line}L${back}Z` });
      const drawn = draw("path", { class: `line${run.length > 1 ? "" : " point"} tone-${tone}`, d: line });
      return this.stacked || this.#series.length === 1 ? [area, drawn] : [drawn];
    });
  }

  #marked() {
    if (this.mark === null) return [];
    const x = this.#x(this.mark);
    return [draw("line", { class: "mark", x1: x, x2: x, y1: 0, y2: HEIGHT })];
  }

  #drawAxes() {
    const levels = Array.from({ length: TICKS + 1 }, (_, number) => (this.top * number) / TICKS);
    this.#grid.replaceChildren(
      ...levels.map((value) => draw("line", { class: "grid", x1: 0, x2: WIDTH, y1: this.#y(value), y2: this.#y(value) })),
    );
    this.#vertical.replaceChildren(...levels.filter((_, number) => number % 2 === 0).map((value) => make("span", {}, this.ticks(value))).reverse());
    const places = [0, 1 / 3, 2 / 3, 1].map((part) => this.from + part * (this.to - this.from));
    this.#horizontal.replaceChildren(...places.map((x, number) => make("span", {}, this.x.tick(x, number === 3))));
  }

  #drawLegend() {
    const key = JSON.stringify(this.#series.map(({ name, tone }) => [name, tone]));
    if (key === this.#shown) return;
    this.#shown = key;
    this.#legend.replaceChildren(
      ...this.#series.map(({ name, tone }) =>
        make("li", {}, make("span", { class: `dot tone-${tone}`, "aria-hidden": "true" }), make("span", { class: "legend-name" }, name), make("b")),
      ),
    );
  }

  /** Return the values of all series at a position, as texts. */
  #texts(x) {
    return this.#series.map(({ points }) => {
      const found = points.find(([at]) => at === x);
      return found && found[1] !== null ? this.format(found[1]) : "-";
    });
  }

  /** Show the values at a position, or with null the latest ones. */
  #moveTo(x) {
    this.#at = x;
    const shown = x ?? this.#values.at(-1) ?? null;
    this.#cursor.setAttribute("visibility", x === null ? "hidden" : "visible");
    if (x !== null) for (const end of ["x1", "x2"]) this.#cursor.setAttribute(end, this.#x(x));
    // The latest values are old after an interruption.
    const late = x === null && shown !== null && this.to - shown > this.gap;
    setText(this.#value, x === null ? "" : this.x.full(x));
    const texts = late ? this.#series.map(() => "-") : this.#texts(shown);
    texts.forEach((text, number) => setText(this.#legend.children[number].lastElementChild, text));
  }

  #point(event) {
    const box = this.#plot.getBoundingClientRect();
    const x = this.from + ((event.clientX - box.left) / box.width) * (this.to - this.from);
    const nearest = this.#values.reduce((best, at) => (best === null || Math.abs(at - x) < Math.abs(best - x) ? at : best), null);
    if (nearest !== null) this.#moveTo(nearest);
  }

  #press(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    const last = this.#values.length - 1;
    if (last < 0 || (step === undefined && event.key !== "Home" && event.key !== "End")) return;
    event.preventDefault();
    const now = this.#at === null ? last + (step < 0 ? 1 : 0) : this.#values.indexOf(this.#at);
    const next = event.key === "Home" ? 0 : event.key === "End" ? last : Math.min(last, Math.max(0, now + step));
    this.#moveTo(this.#values[next]);
    const texts = this.#texts(this.#values[next]).map((text, number) => `${this.#series[number].name} ${text}`);
    setText(this.#spoken, `${this.x.full(this.#values[next])}: ${texts.join(", ")}`);
  }

  #description() {
    const parts = this.#series.flatMap(({ name, points }) => {
      const values = points.map(([, value]) => value).filter((value) => value !== null);
      if (!values.length) return [];
      const [low, high] = [Math.min(...values), Math.max(...values)].map(this.format);
      return [`${name} last ${this.format(values.at(-1))}, lowest ${low}, highest ${high}`];
    });
    return `${this.what}: ${parts.join("; ") || "no data yet"}. Arrow keys read the values.`;
  }
}

/** Return a round number that is not below the value: the top of an axis. */
function nice(value, base) {
  if (!(value > 0)) return 1;
  const unit = base ** Math.floor(Math.log(value) / Math.log(base));
  const digit = 10 ** Math.floor(Math.log10(value / unit));
  return [1, 2, 4, 6, 8, 10].map((times) => times * digit * unit).find((top) => top >= value) ?? 10 * digit * unit;
}

/** Keep the largest series, and add up all others as one. */
export function largest(series, total) {
  const sorted = [...series].sort((a, b) => total(b) - total(a));
  if (sorted.length <= MAX_SERIES) return sorted.map((each, tone) => ({ ...each, tone }));
  const rest = sorted.slice(MAX_SERIES - 1);
  const points = rest[0].points.map(([x], number) => [x, rest.reduce((sum, each) => sum + (each.points[number][1] ?? 0), 0)]);
  return [...sorted.slice(0, MAX_SERIES - 1), { name: `${rest.length} others`, points }].map((each, tone) => ({ ...each, tone }));
}
