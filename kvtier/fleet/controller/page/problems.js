// What needs attention now, the most urgent first. An operator looks here first in an outage.

import { arrange, byId, make, setText } from "./dom.js";
import { age, pluralize } from "./format.js";

const MAX_SHOWN = 8;
const SILENT_SECONDS = 8;
const CATCHING_UP_SECONDS = 60;
const RECENT_SECONDS = 600;
const REFRESH_SECONDS = 15;

/** Return the problems of an instance: { urgent, text }. */
export function problemsOf(instance, now) {
  const { disconnectedAt, last_heartbeat: last, registered_at: registered, up_to_date: upToDate, tiers } = instance;
  if (disconnectedAt) return [{ urgent: true, text: `disconnected for ${age(now - disconnectedAt)}` }];
  const found = tiers.filter(({ available }) => !available).map(({ name }) => ({ urgent: true, text: `tier ${name} is unavailable` }));
  if (last !== null && now - last > SILENT_SECONDS) found.push({ urgent: true, text: `no heartbeat for ${age(now - last)}` });
  if (instance.corrupt) found.push({ urgent: true, text: `${pluralize(instance.corrupt, "corrupt chunk")} in 5 min` });
  if (instance.outages) found.push({ urgent: false, text: `${pluralize(instance.outages, "outage")} of a tier in 5 min` });
  if (instance.failed) found.push({ urgent: false, text: `${pluralize(instance.failed, "failed transfer")} in 5 min` });
  if (instance.peers_down) found.push({ urgent: false, text: `${instance.peers_down} of ${pluralize(instance.peers, "peer")} out of reach` });
  if (!upToDate && now - registered > CATCHING_UP_SECONDS) found.push({ urgent: false, text: `catching up for ${age(now - registered)}` });
  return found;
}

/** Return the problems of instances that have disconnected before, also before the page was opened. */
function absences({ gone, now }) {
  return gone.map(({ instance, host, disconnected_at: at, reason }) => ({
    // It may be meant to be gone.
    urgent: now - at < RECENT_SECONDS,
    instance,
    text: `on ${host} disconnected ${age(now - at)} ago: ${reason}`,
  }));
}

export class Problems {
  #list = byId("problems-list");
  #more = byId("problems-more");
  #rows = new Map();
  #findings = [];
  #loadedAt = 0;

  /** `open` shows an instance. */
  constructor(store, api, open) {
    Object.assign(this, { store, api, open });
  }

  /** Load in what instances differ, so that they share no chunks. On an error the stream fails as well. */
  async load() {
    this.#loadedAt = Date.now() / 1000;
    const { findings } = await this.api.get("findings").catch(() => ({ findings: this.#findings }));
    this.#findings = findings;
  }

  draw() {
    const { instances, connected, now, hasInstances } = this.store;
    if (hasInstances && !document.hidden && Date.now() / 1000 - this.#loadedAt >= REFRESH_SECONDS) this.load();
    const here = connected.flatMap((each) => problemsOf(each, now).map((problem) => ({ ...problem, instance: each.instance })));
    const found = [...absences(this.store).reverse(), ...here];
    const ofAll = this.#findings.map(({ found: text, remedy }) => ({ urgent: false, text: `${text}: ${remedy}` }));
    const all = [...found, ...ofAll].sort((a, b) => b.urgent - a.urgent);
    const section = byId("problems");
    section.dataset.state = all.some(({ urgent }) => urgent) ? "bad" : all.length ? "busy" : "good";
    section.hidden = !hasInstances || !(instances.length || all.length);
    setText(byId("problems-title"), all.length ? pluralize(all.length, "problem") : "No problems");
    const shown = all.slice(0, MAX_SHOWN);
    shown.forEach((problem, number) => this.#row(number).draw(problem));
    arrange(this.#list, shown.map((_, number) => this.#row(number).node));
    const instancesWith = new Set(found.map(({ instance }) => instance)).size;
    const rest = all.length - shown.length;
    setText(this.#more, rest > 0 ? `… and ${rest} more, at ${pluralize(instancesWith, "instance")}: choose “With problems” below.` : "");
  }

  #row(number) {
    if (!this.#rows.has(number)) this.#rows.set(number, new Row(this.open));
    return this.#rows.get(number);
  }
}

class Row {
  #name = make("button", { type: "button", class: "link" });
  #text = make("span");
  #instance = null;

  constructor(open) {
    this.node = make("li", {}, this.#name, this.#text);
    this.#name.addEventListener("click", () => open(this.#instance));
  }

  draw({ instance, text, urgent }) {
    this.#instance = instance ?? null;
    this.#name.hidden = !instance;
    this.node.dataset.urgent = urgent;
    setText(this.#name, instance ?? "");
    setText(this.#text, text);
  }
}
