// Who is there: a card for each instance, drawn once and then changed where something has changed.

import { Chart, fillSeries, hitSeries } from "./chart.js";
import { Bar, arrange, byId, make, say } from "./dom.js";
import { age, bytes, bytesOf, count, many, percent } from "./format.js";

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
      if (!this.#cards.has(instance.instance)) this.#cards.set(instance.instance, new Card(instance.instance));
      this.#cards.get(instance.instance).draw(instance, now);
    }
    arrange(byId("cards"), instances.map(({ instance }) => this.#cards.get(instance).node));
    say(byId("summary"), this.#summary());
    byId("no-instances").hidden = instances.length > 0 || !this.store.hasInstances;
    if (!byId("no-instances").hidden) say(byId("register"), this.#settings());
  }

  #summary() {
    const { connected } = this.store;
    if (!connected.length) return "";
    const held = connected.flatMap(({ tiers }) => tiers).filter(({ shared }) => !shared);
    const used = held.reduce((sum, tier) => sum + tier.used, 0);
    return `${many(connected.length, "connected", "connected")}, ${bytes(used)} held`;
  }

  /** What an operator has to write so that an instance appears. */
  #settings() {
    const url = new URL(".", document.baseURI).href.replace(/\/$/, "");
    const token = this.api.token ? "\n  token: {file: /etc/kvtier/controller-token}" : "";
    return `controller:\n  url: ${url}\n  instance_id: decode-1${token}`;
  }
}

class Card {
  #name = make("h3");
  #badge = make("span", { class: "badge" });
  #heard = make("p", { class: "heard quiet numbers" });
  #facts = make("dl", { class: "facts" });
  #tiers = make("ul", { class: "tiers" });
  #fill = new Chart("Fill", "Fill of each tier");
  #hits = new Chart("Hit rate", "Share of the chunks asked for in each minute that were found");
  #rows = [];
  #drawn = {};

  constructor(id) {
    say(this.#name, id);
    this.node = make(
      "article",
      { class: "card", "aria-label": `Instance ${id}` },
      make("header", {}, this.#name, this.#badge, this.#heard),
      this.#facts,
      make(
        "div",
        { class: "measures" },
        this.#tiers,
        make("div", { class: "charts" }, this.#fill.node, this.#hits.node),
      ),
    );
  }

  draw(instance, now) {
    const [state, words] = condition(instance);
    this.node.dataset.state = state;
    say(this.#badge, words);
    say(this.#heard, heard(instance, now));
    this.#drawFacts(instance);
    this.#drawTiers(instance.tiers);
    this.#drawCharts(instance, now);
  }

  #drawFacts(instance) {
    const facts = [
      ["Host", `${instance.host}, process ${instance.process}`],
      ["Version", instance.version],
      ["Peers", instance.peer ? `${instance.peer} over ${instance.transport}` : "serves none"],
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

  /** Anew with each sample only: in between there is nothing to see. */
  #drawCharts(instance, now) {
    const { history } = instance;
    const key = `${history.length} ${history[0]?.time} ${history.at(-1)?.time}`;
    if (this.#drawn.charts === key) return;
    this.#drawn.charts = key;
    const fill = fillSeries(instance);
    this.#fill.node.hidden = !fill.length;
    this.#fill.show(fill, now);
    this.#hits.show(hitSeries(instance), now);
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
    const words = tier.capacity ? bytesOf(tier.used, tier.capacity) : shared;
    this.bar.node.hidden = !tier.capacity;
    this.bar.set(part, words);
    say(this.#numbers, tier.capacity ? `${words} · ${percent(part)}` : words);
    // Of a pool that others fill, too, an instance knows what it has seen.
    const held = `${many(tier.chunks, "chunk")}${tier.shared ? " known of" : ""}`;
    say(this.#more, `${held} · found ${many(tier.found, "time")}`);
    say(this.#problem, tier.available ? "" : "not available");
  }
}

/** How an instance is, for the style sheet and in words. */
function condition({ gone, in_step: inStep }) {
  if (gone) return ["gone", "gone"];
  return inStep ? ["here", "in step"] : ["behind", "catching up"];
}

function heard({ gone, last_heartbeat: last, hit_rate: rate, looked_up: asked }, now) {
  if (gone) return `since ${age(now - gone)}`;
  const since = last === null ? "not heard yet" : `heard ${age(now - last)} ago`;
  const hits = asked && rate !== null ? `found ${percent(rate)} of ${count(asked)} chunks, ` : "";
  return hits + since;
}
