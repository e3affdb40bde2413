// What other capacities and policies would bring to an instance. Loaded when it is opened, and then after each report.

import { Chart } from "./chart.js";
import { make, setText } from "./dom.js";
import { age, bytes, bytesTick, percent } from "./format.js";

const AXIS = { tick: bytesTick, full: bytes };

export class WhatIf {
  #age = make("span", { class: "quiet numbers" });
  #findings = make("ul", { class: "findings" });
  #basis = make("ul", { class: "basis" });
  #curves = make("div", { class: "charts" });
  #problem = make("p", { class: "problem", role: "status" });
  #drawn = new Map();
  /** When that was reported which is shown or being loaded. */
  #shown = null;
  #reported = null;
  #tiers = [];

  constructor(id, api) {
    this.id = id;
    this.api = api;
    this.node = make(
      "details",
      { class: "what-if" },
      make("summary", {}, make("span", {}, "What if"), this.#age),
      this.#findings,
      this.#curves,
      this.#basis,
      this.#problem,
    );
    this.node.addEventListener("toggle", () => this.#load());
  }

  draw({ what_if_at: reported, disconnectedAt, tiers }, now) {
    this.#tiers = tiers.map(({ name }) => name);
    this.#reported = reported ?? null;
    this.node.hidden = this.#reported === null;
    if (this.#reported === null) return;
    setText(this.#age, ` estimated ${age(now - this.#reported)} ago`);
    if (!disconnectedAt) this.#load();
  }

  async #load() {
    const wanted = this.#reported;
    if (!this.node.open || wanted === null || this.#shown === wanted) return;
    this.#shown = wanted;
    try {
      const answer = await this.api.get(`instances/${encodeURIComponent(this.id)}/whatif`);
      if (this.#shown !== wanted) return; // A later one is being loaded.
      this.#show(answer);
      setText(this.#problem, "");
    } catch (error) {
      setText(this.#problem, error.message);
    }
  }

  #show({ findings, basis, report }) {
    this.#findings.replaceChildren(...findings.map((text) => make("li", {}, text)));
    this.#basis.replaceChildren(...basis.map((text) => make("li", {}, text)));
    const tiers = report?.tiers ?? [];
    for (const name of this.#drawn.keys()) if (!tiers.some(({ tier }) => tier === name)) this.#drawn.delete(name);
    for (const tier of tiers) this.#drawCurve(tier);
    this.#curves.replaceChildren(...tiers.map(({ tier }) => this.#drawn.get(tier).node));
  }

  /** Draw the hit rate over the capacity of a tier, with a mark at the capacity of today. */
  #drawCurve({ tier, policy, capacity_bytes: capacity, hit_rate: rate, points }) {
    const known = points.map((point) => [point.capacity_bytes, point.hit_rate, point.fast_hit_rate ?? null]);
    if (!known.some(([size]) => size === capacity)) known.push([capacity, rate, null]);
    known.sort(([a], [b]) => a - b);
    if (!this.#drawn.has(tier)) {
      const title = `Hit rate by capacity of ${tier}, policy ${policy}`;
      const what = `Estimated hit rate by the capacity of tier ${tier}; the mark is the capacity of today, ${bytes(capacity)}`;
      this.#drawn.set(tier, new Chart({ title, what, format: percent, whole: 1, x: AXIS }));
    }
    // In the colour that the tier has everywhere in these details.
    const tone = Math.max(0, this.#tiers.indexOf(tier)) % 6;
    const series = [{ name: "hit rate", tone, points: known.map(([size, all]) => [size, all]) }];
    const fast = known.filter(([, , inFast]) => inFast !== null).map(([size, , inFast]) => [size, inFast]);
    if (fast.length) series.push({ name: `in ${tier} or faster`, tone: (tone + 3) % 6, points: fast });
    this.#drawn.get(tier).show({ series, from: 0, to: Math.max(1, known.at(-1)[0]), mark: capacity });
  }
}
