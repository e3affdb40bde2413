// What the whole fleet did in the chosen span: totals, and charts over time. An operator looks here to review the
// cost. Loaded from the controller, which keeps it.

import { byId, cell, make, row, setText } from "./dom.js";
import { amount, bytes, compact, count, percent, pluralize } from "./format.js";
import { Charts, SPANS, found, rate, totals } from "./history.js";

export const REFRESH_SECONDS = { hour: 10, day: 60, week: 300 };

export class Overview {
  #tiles = new Map();
  #charts = new Charts(byId("fleet-charts"), ["served", "hits", "misses", "saved", "moved", "used", "faults", "instances"]);
  #loadedAt = 0;
  #answer = null;

  /** `onSpan` is called when another span is chosen. */
  constructor(store, api, onSpan) {
    this.store = store;
    this.api = api;
    this.span = "hour";
    for (const name of ["served", "rate", "saved", "gpus", "moved", "held"]) this.#tile(name);
    byId("span").addEventListener("change", ({ target }) => {
      this.span = target.value;
      this.load();
      onSpan();
    });
  }

  draw() {
    if (!document.hidden && Date.now() / 1000 - this.#loadedAt >= REFRESH_SECONDS[this.span]) this.load();
    this.#drawHeld();
  }

  async load() {
    const { span } = this;
    this.#loadedAt = Date.now() / 1000;
    try {
      const answer = await this.api.get(`history?span=${span}`);
      if (span !== this.span) return; // Another span is being loaded.
      setText(byId("overview-problem"), "");
      this.#answer = answer;
      this.#show();
    } catch (error) {
      setText(byId("overview-problem"), error.message);
    }
  }

  #tile(name) {
    const node = byId(`tile-${name}`);
    const value = make("dd", { class: "numbers" });
    const more = make("dd", { class: "quiet numbers" });
    node.append(value, more);
    this.#tiles.set(name, [value, more]);
  }

  #set(name, value, more = "") {
    const nodes = this.#tiles.get(name);
    setText(nodes[0], value);
    setText(nodes[1], more);
  }

  #show() {
    const { history, step } = this.#answer;
    const samples = history[""] ?? [];
    this.#charts.show(samples, { span: this.span, step, now: this.store.now });
    const looked = samples.reduce((total, each) => total + each.looked_up_tokens, 0);
    const hit = samples.reduce((total, each) => total + found(each), 0);
    const [saved, gpus] = ["saved_seconds", "gpu_seconds"].map((name) => samples.reduce((total, each) => total + each[name], 0));
    const moved = totals(samples, ({ moved_bytes: routes }) => routes);
    const part = rate(hit, looked);
    this.#set("served", compact(hit), parts(totals(samples, ({ hit_tokens: hits }) => hits), hit));
    this.#set("rate", part === null ? "-" : percent(part), `of ${compact(looked)} tokens looked up`);
    this.#set("saved", saved ? amount(saved) : "-", saved ? "of computing prompts" : "no engine has reported its speed");
    this.#set("gpus", gpus ? amount(gpus) : "-", gpus ? "on all ranks of each model" : "");
    const [peers, other] = split(moved, (route) => route.startsWith("peers →") || route.endsWith("→ peers"));
    this.#set("moved", bytes(peers + other), peers ? `${bytes(peers)} between instances` : "between tiers");
    const seconds = samples.reduce((total, each) => total + each.seconds, 0);
    const whole = seconds && samples.length ? `, ${amount(seconds)} observed` : "";
    setText(byId("span-text"), `Last ${SPANS[this.span]}${whole}`);
  }

  #drawHeld() {
    const { connected } = this.store;
    const tiers = connected.flatMap((instance) => instance.tiers).filter(({ shared }) => !shared);
    const [used, capacity] = ["used", "capacity"].map((name) => tiers.reduce((total, tier) => total + (tier[name] ?? 0), 0));
    const [known, chunks] = [capacity ? `${percent(used / capacity)} of ${bytes(capacity)}` : "", tiers.reduce((total, tier) => total + tier.chunks, 0)];
    this.#set("held", bytes(used), connected.length ? `${known}, ${compact(chunks)} chunks` : "");
    setText(byId("summary"), connected.length ? pluralize(connected.length, "connected", "connected") : "");
  }
}

/** Describe the largest parts of a whole: "ram 61 %, ssd 30 %". */
function parts(values, whole) {
  const known = Object.entries(values).filter(([, value]) => value).sort((a, b) => b[1] - a[1]);
  return known.slice(0, 3).map(([name, value]) => `${name} ${percent(value / whole)}`).join(", ") || "tokens";
}

function split(values, chosen) {
  const sums = [0, 0];
  for (const [name, value] of Object.entries(values)) sums[chosen(name) ? 0 : 1] += value;
  return sums;
}

/** The totals of the span by model and by tenant. */
export class Breakdown {
  #loadedAt = 0;

  constructor(overview, api) {
    this.overview = overview;
    this.api = api;
  }

  draw() {
    const seconds = Math.max(30, REFRESH_SECONDS[this.overview.span]);
    if (!document.hidden && Date.now() / 1000 - this.#loadedAt >= seconds) this.load();
  }

  async load() {
    this.#loadedAt = Date.now() / 1000;
    for (const kind of ["model", "tenant"]) {
      const { span } = this.overview;
      try {
        const { history } = await this.api.get(`history?span=${span}&of=${kind}&total=true`);
        if (span !== this.overview.span) return;
        this.#show(kind, history);
      } catch (error) {
        setText(byId(`${kind}s-empty`), error.message);
      }
    }
  }

  #show(kind, history) {
    const totals = Object.entries(history).map(([name, [total]]) => [name, total]);
    const rows = totals.sort((a, b) => b[1].looked_up_tokens - a[1].looked_up_tokens);
    byId(`${kind}s-table`).hidden = !rows.length;
    setText(byId(`${kind}s-empty`), rows.length ? "" : EMPTY[kind]);
    byId(`${kind}s-rows`).replaceChildren(...rows.map(([name, total]) => usageRow(name, total)));
  }
}

const EMPTY = {
  model: "No lookup was counted in this time.",
  tenant: "No tenant is configured: `tenants` in the settings of the instances.",
};

function usageRow(name, total) {
  const hit = found(total);
  const part = rate(hit, total.looked_up_tokens);
  const cells = [
    ["Instances", count(total.instances)],
    ["Looked up", compact(total.looked_up_tokens)],
    ["Served", compact(hit)],
    ["Hit rate", part === null ? "-" : percent(part)],
    ["Prefill saved", total.saved_seconds ? amount(total.saved_seconds) : "-"],
    ["GPU time saved", total.gpu_seconds ? amount(total.gpu_seconds) : "-"],
  ];
  return row(name, cells.map(([label, text]) => cell(label, { class: "numbers" }, text)));
}
