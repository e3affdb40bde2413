// The table of instances: sorted, filtered, and short until all are asked for. A row opens the details.

import { Bar, arrange, byId, cell, make, row, setOptions, setText } from "./dom.js";
import { age, bytesOf, compact, count, percent, pluralize } from "./format.js";
import { Detail } from "./instance.js";
import { problemsOf } from "./problems.js";
import { byName } from "./store.js";

/** Rows that are shown at first. */
const FEW = 25;

const used = ({ tiers }, of) => tiers.reduce((total, tier) => total + (tier.capacity ? tier[of] : 0), 0);
const fill = (instance) => used(instance, "used") / Math.max(1, used(instance, "capacity"));
const rank = (problems) => (problems.some(({ urgent }) => urgent) ? 2 : problems.length ? 1 : 0);

/** The columns: their header, and what they sort by. Numbers are sorted from the largest at first. */
const COLUMNS = {
  instance: { name: "Instance", by: ({ instance }) => instance.instance },
  state: { name: "State", by: ({ problems }) => rank(problems), falls: true },
  hits: { name: "Hit rate", by: ({ instance }) => instance.hit_rate ?? -1, falls: true },
  looked: { name: "Looked up, 5 min", by: ({ instance }) => instance.looked_up_tokens, falls: true },
  fill: { name: "Fill", by: ({ instance }) => fill(instance), falls: true },
  pinned: { name: "Pinned", by: ({ instance }) => instance.pinned, falls: true },
  models: { name: "Models", by: ({ instance }) => instance.models.join(", ") },
  version: { name: "Version", by: ({ instance }) => instance.version },
};

const STATES = {
  all: { name: "All states", holds: () => true },
  problems: { name: "With problems", holds: ({ problems }) => problems.length > 0 },
  ready: { name: "Up to date", holds: ({ instance }) => !instance.disconnectedAt && instance.up_to_date },
  catching: { name: "Catching up", holds: ({ instance }) => !instance.disconnectedAt && !instance.up_to_date },
  disconnected: { name: "Disconnected", holds: ({ instance }) => Boolean(instance.disconnectedAt) },
};

export class Instances {
  #rows = new Map();
  #open = new Set();
  #sort = { column: "state", falls: true };
  #all = false;
  #headers = new Map();

  constructor(store, api, overview) {
    Object.assign(this, { store, api, overview });
    for (const [column, { name }] of Object.entries(COLUMNS)) {
      const button = make("button", { type: "button", class: "sort" }, name);
      button.addEventListener("click", () => this.#sortBy(column));
      const header = make("th", { scope: "col", class: `column-${column}` }, button);
      this.#headers.set(column, header);
      byId("columns").append(header);
    }
    setOptions(byId("filter-state"), Object.entries(STATES).map(([value, { name }]) => [value, name]));
    setOptions(byId("sort"), Object.entries(COLUMNS).map(([value, { name }]) => [value, `Sort by ${name}`]));
    byId("sort").addEventListener("change", ({ target }) => this.#sortBy(target.value));
    for (const id of ["filter", "filter-state"]) byId(id).addEventListener("input", () => this.draw());
    byId("show-all").addEventListener("click", () => {
      this.#all = true;
      this.draw();
    });
    this.#drawSort();
  }

  /** Show the details of an instance, whatever the filter is. */
  show(id) {
    this.#open.add(id);
    byId("filter").value = id;
    byId("filter-state").value = "all";
    this.draw();
    const found = this.#rows.get(id);
    found?.node.scrollIntoView({ block: "start" });
    found?.focus();
  }

  draw() {
    const { instances, now } = this.store;
    const entries = instances.map((instance) => ({ instance, problems: problemsOf(instance, now) }));
    for (const id of this.#rows.keys()) if (!this.store.instance(id)) this.#forget(id);
    const chosen = this.#sorted(entries.filter((entry) => this.#matches(entry)));
    const shown = this.#all ? chosen : chosen.slice(0, FEW);
    const nodes = shown.flatMap((entry) => {
      const each = this.#row(entry.instance.instance);
      each.draw(entry, now);
      return each.nodes;
    });
    arrange(byId("rows"), nodes);
    this.#drawTexts(instances, chosen, shown);
  }

  #drawTexts(instances, chosen, shown) {
    const part = chosen.length < instances.length ? `${count(chosen.length)} of ${count(instances.length)}` : "";
    setText(byId("filtered"), part);
    byId("show-all").hidden = shown.length === chosen.length;
    setText(byId("show-all"), `Show ${pluralize(chosen.length - shown.length, "more instance")}`);
    byId("no-match").hidden = chosen.length > 0 || !instances.length;
    byId("table").hidden = !chosen.length;
    byId("controls").hidden = !instances.length;
    byId("no-instances").hidden = instances.length > 0 || !this.store.hasInstances;
    if (!byId("no-instances").hidden) setText(byId("register"), this.#settings());
  }

  #forget(id) {
    this.#rows.delete(id);
    this.#open.delete(id);
  }

  #row(id) {
    if (!this.#rows.has(id)) this.#rows.set(id, new Row(id, this, this.#open));
    return this.#rows.get(id);
  }

  /** Every word of the filter must be part of something that the row is about. */
  #matches(entry) {
    const { instance } = entry;
    if (!STATES[byId("filter-state").value].holds(entry)) return false;
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return true;
    const { instance: id, host, version, peer, models, engines, tiers } = instance;
    const texts = [id, host, version, peer ?? "", ...models, ...engines, ...tiers.map(({ name }) => name)];
    const all = texts.join("\n").toLowerCase();
    return words.every((word) => all.includes(word));
  }

  #sorted(entries) {
    const { by } = COLUMNS[this.#sort.column];
    const sign = this.#sort.falls ? -1 : 1;
    const keyed = entries.map((entry) => [by(entry), entry]);
    // Equal ones stay sorted by name.
    keyed.sort(([a], [b]) => sign * (typeof a === "string" ? byName(a, b) : a - b));
    return keyed.map(([, entry]) => entry);
  }

  #sortBy(column) {
    const same = this.#sort.column === column;
    this.#sort = { column, falls: same ? !this.#sort.falls : Boolean(COLUMNS[column].falls) };
    this.#drawSort();
    this.draw();
  }

  #drawSort() {
    for (const [column, header] of this.#headers) {
      if (column !== this.#sort.column) header.removeAttribute("aria-sort");
      else header.setAttribute("aria-sort", this.#sort.falls ? "descending" : "ascending");
    }
    byId("sort").value = this.#sort.column;
  }

  /** Return the settings with which an instance registers. */
  #settings() {
    const url = new URL(".", document.baseURI).href.replace(/\/$/, "");
    const token = this.api.token ? "\n  token: {file: /etc/kvtier/controller-token}" : "";
    return `controller:\n  url: ${url}\n  instance_id: decode-1${token}`;
  }
}

class Row {
  #cells = {};
  #detail = null;
  #detailRow = null;

  constructor(id, table, open) {
    Object.assign(this, { id, table, open });
    this.button = make("button", { type: "button", class: "link toggle", "aria-expanded": "false" }, id);
    this.button.addEventListener("click", () => this.#toggle());
    this.badge = make("span", { class: "badge" });
    this.problem = make("span", { class: "row-problem" });
    this.bar = new Bar(`Fill of ${id}`);
    this.fill = make("span", { class: "numbers" });
    for (const column of ["hits", "looked", "pinned", "models", "version"]) {
      // Without the time, which has no room where cells have labels.
      this.#cells[column] = cell(COLUMNS[column].name.split(",")[0], { class: `column-${column}` });
    }
    for (const column of ["hits", "looked", "pinned"]) this.#cells[column].classList.add("numbers");
    const { hits, looked, pinned, models, version } = this.#cells;
    const state = cell("State", { class: "column-state" }, this.badge, this.problem);
    const filled = cell("Fill", { class: "column-fill" }, this.fill, this.bar.node);
    this.node = row(this.button, [state, hits, looked, filled, pinned, models, version], { class: "row" });
  }

  /** The row, and below it the details if they are open. */
  get nodes() {
    return this.#detailRow ? [this.node, this.#detailRow] : [this.node];
  }

  focus() {
    this.button.focus({ preventScroll: true });
  }

  draw({ instance, problems }, now) {
    if (this.open.has(this.id) !== (this.#detail !== null)) this.#setOpen(this.open.has(this.id));
    const [state, label] = condition(instance);
    this.node.dataset.state = state;
    this.node.dataset.problems = rank(problems);
    setText(this.badge, label);
    setText(this.problem, problems.map(({ text }) => text).join("; ") || heartbeat(instance, now));
    const { hit_rate: rate, looked_up_tokens: looked } = instance;
    setText(this.#cells.hits, rate === null ? "-" : percent(rate));
    setText(this.#cells.looked, looked ? compact(looked) : "-");
    const [held, capacity] = ["used", "capacity"].map((of) => used(instance, of));
    setText(this.fill, bytesOf(held, capacity));
    this.bar.set(fill(instance), bytesOf(held, capacity));
    setText(this.#cells.pinned, instance.pinned ? count(instance.pinned) : "-");
    setText(this.#cells.models, instance.models[0] ? instance.models[0] + (instance.models.length > 1 ? ` +${instance.models.length - 1}` : "") : "-");
    setText(this.#cells.version, instance.version);
    this.#detail?.draw(instance, now);
  }

  #toggle() {
    if (this.open.has(this.id)) this.open.delete(this.id);
    else this.open.add(this.id);
    this.table.draw();
  }

  #setOpen(open) {
    const { store, api, overview } = this.table;
    this.button.setAttribute("aria-expanded", open);
    this.#detail = open ? new Detail(this.id, store, api, overview) : null;
    const columns = Object.keys(COLUMNS).length;
    this.#detailRow = open ? make("tr", { class: "detail-row", role: "row" }, make("td", { colspan: columns, role: "cell" }, this.#detail.node)) : null;
  }
}

/** Return the state of an instance: as a name for the style sheet, and as text. */
function condition({ disconnectedAt, up_to_date: upToDate }) {
  if (disconnectedAt) return ["disconnected", "disconnected"];
  return upToDate ? ["up-to-date", "up to date"] : ["catching-up", "catching up"];
}

function heartbeat({ last_heartbeat: last }, now) {
  return last === null ? "no heartbeat yet" : `heartbeat ${age(now - last)} ago`;
}
