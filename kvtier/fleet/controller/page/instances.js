// One card per instance. A card is created once, then updated where something has changed.

import { Chart, fillSeries, hitSeries } from "./chart.js";
import { Bar, arrange, byId, make, setText } from "./dom.js";
import { age, bytes, bytesOf, count, percent, pluralize } from "./format.js";
import { Pins } from "./pins.js";
import { WhatIf } from "./whatif.js";

export class Instances {
  #cards = new Map();

  constructor(store, api) {
    this.store = store;
    this.api = api;
  }

  draw() {
    const { instances, now } = this.store;
    const known = new Set(instances.map(({ instance }) => instance));
    for (const id of this.#cards.keys()) if (!known.has(id)) this.#cards.delete(id);
    for (const instance of instances) {
      if (!this.#cards.has(instance.instance)) this.#cards.set(instance.instance, new Card(instance.instance, this.api));
      this.#cards.get(instance.instance).draw(instance, now);
    }
    arrange(byId("cards"), instances.map(({ instance }) => this.#cards.get(instance).node));
    setText(byId("summary"), this.#summary());
    byId("no-instances").hidden = instances.length > 0 || !this.store.hasInstances;
    if (!byId("no-instances").hidden) setText(byId("register"), this.#settings());
  }

  #summary() {
    const { connected } = this.store;
    if (!connected.length) return "";
    const held = connected.flatMap(({ tiers }) => tiers).filter(({ shared }) => !shared);
    const used = held.reduce((sum, tier) => sum + tier.used, 0);
    return `${pluralize(connected.length, "connected", "connected")}, ${bytes(used)} held`;
  }

  /** Return the settings with which an instance registers. */
  #settings() {
    const url = new URL(".", document.baseURI).href.replace(/\/$/, "");
    const token = this.api.token ? "\n  token: {file: /etc/kvtier/controller-token}" : "";
    return `controller:\n  url: ${url}\n  instance_id: decode-1${token}`;
  }
}

class Card {
  #name = make("h3");
  #badge = make("span", { class: "badge" });
  #heartbeat = make("p", { class: "heartbeat quiet numbers" });
  #facts = make("dl", { class: "facts" });
  #tiers = make("ul", { class: "tiers" });
  #fill = new Chart("Fill", "Fill of each tier");
  #hits = new Chart("Hit rate, 5 min", "Part of the tokens looked up in the last 5 minutes that were found");
  #rows = [];
  #drawn = {};

  constructor(id, api) {
    setText(this.#name, id);
    this.pins = new Pins(id, api);
    this.whatIf = new WhatIf(id, api);
    this.node = make(
      "article",
      { class: "card", "aria-label": `Instance ${id}` },
      make("header", {}, this.#name, this.#badge, this.#heartbeat),
      this.#facts,
      make(
        "div",
        { class: "measures" },
        this.#tiers,
        make("div", { class: "charts" }, this.#fill.node, this.#hits.node),
      ),
      this.pins.node,
      this.whatIf.node,
    );
  }

  draw(instance, now) {
    const [state, label] = condition(instance);
    this.node.dataset.state = state;
    setText(this.#badge, label);
    setText(this.#heartbeat, heartbeat(instance, now));
    this.#drawFacts(instance);
    this.#drawTiers(instance.tiers);
    this.#drawCharts(instance, now);
    this.pins.draw(instance);
    this.whatIf.draw(instance, now);
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

  /** Redraw the charts when there is a new sample or hit rate, or should be one. */
  #drawCharts(instance, now) {
    const { history } = instance;
    // At least every ten seconds, so that a gap at the end is seen.
    const key = `${history.length} ${history[0]?.time} ${history.at(-1)?.time} ${Math.floor(now / 10)} ${instance.hit_rate} ${instance.disconnectedAt}`;
    if (this.#drawn.charts === key) return;
    this.#drawn.charts = key;
    const fill = fillSeries(instance, now);
    this.#fill.node.hidden = !fill.length;
    this.#fill.show(fill, now);
    this.#hits.show(hitSeries(instance, now), now);
  }
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
        make("span", { class: `dot tone-${number % 4}`, "aria-hidden": "true" }),
        make("span", { class: "tier-name" }, name),
        make("span", { class: "quiet" }, type === name ? "" : type),
        this.#problem,
        this.#numbers,
      ),
      this.bar.node,
      this.#more,
    );
    this.bar.node.classList.add(`tone-${number % 4}`);
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
    setText(this.#more, `${held} · found ${pluralize(tier.found, "time")}`);
    setText(this.#problem, tier.available ? "" : "unavailable");
  }
}

/** Return the state of an instance: as a name for the style sheet, and as text. */
function condition({ disconnectedAt, up_to_date: upToDate }) {
  if (disconnectedAt) return ["disconnected", "disconnected"];
  return upToDate ? ["up-to-date", "up to date"] : ["catching-up", "catching up"];
}

function heartbeat({ disconnectedAt, last_heartbeat: last, hit_rate: rate, looked_up_tokens: lookedUp }, now) {
  if (disconnectedAt) return `for ${age(now - disconnectedAt)}`;
  const since = last === null ? "no heartbeat yet" : `heartbeat ${age(now - last)} ago`;
  const hits = lookedUp && rate !== null ? `hit ${percent(rate)} of ${count(lookedUp)} tokens in 5 min, ` : "";
  return hits + since;
}
