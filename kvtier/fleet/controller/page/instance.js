// The details of one instance: facts, tiers, charts, peers, pins and what-if. Drawn while they are open.

import { Bar, make, setText } from "./dom.js";
import { bytes, bytesOf, count, percent, pluralize, throughput } from "./format.js";
import { Charts } from "./history.js";
import { REFRESH_SECONDS } from "./overview.js";
import { Pins } from "./pins.js";
import { WhatIf } from "./whatif.js";

export class Detail {
  #facts = make("dl", { class: "facts" });
  #tiers = make("ul", { class: "tiers" });
  #peers = make("ul", { class: "quiet numbers" });
  #peersPart = make("section", { class: "pins", hidden: "" }, make("h4", {}, "Peers"), this.#peers);
  #problem = make("p", { class: "problem", role: "status" });
  #chartsNode = make("div", { class: "charts" });
  #charts = new Charts(this.#chartsNode, ["hits", "served", "misses", "fill", "moved", "faults"]);
  #rows = [];
  #drawn = {};
  #loaded = { at: 0, span: null };

  /** `overview` has the chosen span. */
  constructor(id, store, api, overview) {
    Object.assign(this, { id, store, api, overview });
    this.pins = new Pins(id, api);
    this.whatIf = new WhatIf(id, api);
    this.node = make(
      "article",
      { class: "instance", "aria-label": `Instance ${id}` },
      this.#facts,
      this.#problem,
      make(
        "div",
        { class: "measures" },
        make("div", {}, this.#tiers, this.#peersPart, this.pins.node),
        this.#chartsNode,
      ),
      this.whatIf.node,
    );
  }

  draw(instance, now) {
    this.node.dataset.state = instance.disconnectedAt ? "disconnected" : "connected";
    this.#drawFacts(instance);
    this.#drawTiers(instance.tiers);
    this.pins.draw(instance);
    this.whatIf.draw(instance, now);
    const { span } = this.overview;
    const due = Date.now() / 1000 - this.#loaded.at >= REFRESH_SECONDS[span];
    if ((due && !document.hidden) || this.#loaded.span !== span) this.#load(span, instance);
  }

  async #load(span, { disconnectedAt, peers }) {
    this.#loaded = { at: Date.now() / 1000, span };
    const name = encodeURIComponent(this.id);
    try {
      const { history, step } = await this.api.get(`history?span=${span}&of=instance&name=${name}`);
      if (this.#loaded.span !== span) return; // Another span is being loaded.
      this.#charts.show(history[this.id] ?? [], { span, step, now: this.store.now });
      if (peers && !disconnectedAt) this.#showPeers((await this.api.get(`peers?limit=1000&instance=${name}`)).peers);
      setText(this.#problem, "");
    } catch (error) {
      setText(this.#problem, error.message);
    }
  }

  #drawFacts(instance) {
    const facts = [
      ["Host", `${instance.host}, process ${instance.process}`],
      ["Version", instance.version],
      ["Peers", instance.peer ? `${instance.peer} over ${instance.transport}` : "not served"],
      ["Models", instance.models.join(", ") || "none yet: no engine has connected"],
      ["Engines", instance.engines.join(", ") || "none connected"],
    ];
    const key = JSON.stringify(facts);
    if (this.#drawn.facts === key) return;
    this.#drawn.facts = key;
    this.#facts.replaceChildren(
      ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
    );
  }

  #drawTiers(tiers) {
    const key = JSON.stringify(tiers.map(({ name, type }) => [name, type]));
    if (this.#drawn.tiers !== key) {
      this.#drawn.tiers = key;
      this.#rows = tiers.map((tier, number) => new TierRow(tier, number));
      this.#tiers.replaceChildren(...this.#rows.map(({ node }) => node));
    }
    tiers.forEach((tier, number) => this.#rows[number].draw(tier));
  }

  #showPeers(peers) {
    this.#peersPart.hidden = !peers.length;
    this.#peers.replaceChildren(...peers.map((peer) => make("li", {}, peerText(peer))));
  }
}

function peerText({ address, peer, state, read_bytes: read, bytes_per_second: speed }) {
  const name = peer ? `${peer} at ${address}` : address;
  return `${name}: ${state}, ${bytes(read)} fetched${speed ? `, ${throughput(speed)}` : ""}`;
}

class TierRow {
  #numbers = make("span", { class: "tier-numbers numbers" });
  #more = make("p", { class: "tier-more quiet numbers" });
  #problem = make("span", { class: "problem" });

  constructor({ name, type }, number) {
    this.bar = new Bar(`Fill of tier ${name}`);
    this.node = make(
      "li",
      {},
      make(
        "p",
        { class: "tier-head" },
        make("span", { class: `dot tone-${number % 6}`, "aria-hidden": "true" }),
        make("span", { class: "tier-name" }, name),
        make("span", { class: "quiet" }, type === name ? "" : type),
        this.#problem,
        this.#numbers,
      ),
      this.bar.node,
      this.#more,
    );
    this.bar.node.classList.add(`tone-${number % 6}`);
  }

  draw(tier) {
    const part = tier.capacity ? tier.used / tier.capacity : 0;
    const shared = tier.type === "peers" ? "other instances" : "shared pool";
    const text = tier.capacity ? bytesOf(tier.used, tier.capacity) : shared;
    this.bar.node.hidden = !tier.capacity;
    this.bar.set(part, text);
    setText(this.#numbers, tier.capacity ? `${text} · ${percent(part)}` : text);
    // An instance knows only part of what a shared pool holds.
    const held = `${pluralize(tier.chunks, "chunk")}${tier.shared ? " known" : ""}`;
    const faults = [[tier.outages, "outage"], [tier.corrupt, "corrupt chunk"]].filter(([number]) => number);
    const parts = [held, `found ${pluralize(tier.found, "time")}`, ...faults.map(([number, name]) => pluralize(number, name))];
    setText(this.#more, parts.join(" · "));
    setText(this.#problem, tier.available ? "" : "unavailable");
  }
}

/** Describe the lookups of five minutes. */
export function hitText({ hit_rate: rate, looked_up_tokens: lookedUp }) {
  return lookedUp && rate !== null ? `${percent(rate)} of ${count(lookedUp)} tokens` : "no lookup";
}
