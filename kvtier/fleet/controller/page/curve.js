// A small chart of the hit rate over the capacity of one tier, with a mark at the capacity of today. The area is the
// part of the hits that are in this tier or a faster one.

import { HEIGHT, WIDTH, lines } from "./chart.js";
import { draw, make, setText } from "./dom.js";
import { bytes, percent } from "./format.js";

export class Curve {
  #name = make("span");
  #value = make("span", { class: "chart-value numbers" });
  #largest = make("span");
  #grid = lines();
  #line = draw("g");
  #today = draw("line", { class: "today", y1: 0, y2: HEIGHT });
  #cursor = draw("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
  #svg = draw(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
    ...this.#grid,
    this.#line,
    this.#today,
    this.#cursor,
  );
  #points = [];

  constructor(tone) {
    this.tone = tone;
    this.node = make(
      "figure",
      { class: "chart" },
      make("figcaption", {}, this.#name, this.#value),
      this.#svg,
      make("p", { class: "axis numbers", "aria-hidden": "true" }, make("span", {}, "0"), this.#largest),
    );
    this.#svg.addEventListener("pointermove", (event) => this.#showAt(event));
    this.#svg.addEventListener("pointerleave", () => this.#showToday());
  }

  /** Draw the curve of a tier as the API describes it. */
  show({ tier, policy, capacity_bytes: capacity, hit_rate: rate, points }) {
    this.#points = points.map((point) => [point.capacity_bytes, point.hit_rate, point.fast_hit_rate ?? null]);
    if (!this.#points.some(([size]) => size === capacity)) this.#points.push([capacity, rate, null]);
    this.#points.sort(([a], [b]) => a - b);
    this.tier = tier;
    this.capacity = capacity;
    this.largest = Math.max(1, this.#points.at(-1)[0]);
    this.#line.replaceChildren(...this.#paths());
    for (const end of ["x1", "x2"]) this.#today.setAttribute(end, this.#x(capacity));
    setText(this.#name, `${tier}, policy ${policy}`);
    setText(this.#largest, bytes(this.largest));
    this.#svg.setAttribute("aria-label", this.#description());
    this.#showToday();
  }

  #x = (size) => (WIDTH * size) / this.largest;

  #paths() {
    const path = (points) => `M${points.map(([size, part]) => `${this.#x(size).toFixed(1)} ${(HEIGHT * (1 - part)).toFixed(1)}`).join("L")}`;
    const drawn = [draw("path", { class: `line tone-${this.tone}`, d: path(this.#points) })];
    const fast = this.#points.filter((point) => point[2] !== null).map(([size, , part]) => [size, part]);
    if (fast.length) {
      const ends = [[fast.at(-1)[0], 0], [fast[0][0], 0]];
      drawn.unshift(draw("path", { class: `area tone-${this.tone}`, d: `${path([...fast, ...ends])}Z` }));
    }
    return drawn;
  }

  #showToday() {
    this.#cursor.setAttribute("visibility", "hidden");
    setText(this.#value, this.#text(this.#points.find(([size]) => size === this.capacity)));
  }

  #text([size, rate]) {
    return `${bytes(size)}  ${percent(rate)}`;
  }

  /** Show the estimate nearest to the pointer. */
  #showAt(event) {
    const box = this.#svg.getBoundingClientRect();
    const size = (this.largest * (event.clientX - box.left)) / box.width;
    const off = ([at]) => Math.abs(at - size);
    const nearest = this.#points.reduce((best, point) => (off(best) <= off(point) ? best : point));
    for (const end of ["x1", "x2"]) this.#cursor.setAttribute(end, this.#x(nearest[0]));
    this.#cursor.setAttribute("visibility", "visible");
    setText(this.#value, this.#text(nearest));
  }

  #description() {
    const parts = this.#points.map(([size, rate, fast]) => {
      const part = fast === null ? "" : `, ${percent(fast)} in ${this.tier} or faster`;
      return `${percent(rate)} with ${bytes(size)}${part}`;
    });
    return `Estimated hit rate by the capacity of ${this.tier}, today ${bytes(this.capacity)}: ${parts.join("; ")}`;
  }
}
