// What other capacities and policies would bring to an instance. Loaded when it is opened, and again while it is
// open and the instance has reported something new: there may be hundreds of instances.

import { Curve } from "./curve.js";
import { make, setText } from "./dom.js";
import { age } from "./format.js";

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
    for (const tier of tiers) {
      // In the colour that the tier has everywhere on its card.
      if (!this.#drawn.has(tier.tier)) this.#drawn.set(tier.tier, new Curve(this.#tiers.indexOf(tier.tier) % 4));
      this.#drawn.get(tier.tier).show(tier);
    }
    this.#curves.replaceChildren(...tiers.map(({ tier }) => this.#drawn.get(tier).node));
  }
}
