// Why tokens were not hits: the last requests of all instances, each as a bar, and where prompts part. A prompt that is
// looked up is shown in the same way.

import { arrange, byId, cell, make, row, setText } from "./dom.js";
import { amount, clock, compact, count, percent, pluralize } from "./format.js";

const REFRESH_SECONDS = 30;
const LAST = 20;
const MAX_BREAKERS = 5;
const MAX_INSTANCES = 5;
const MAX_NAMED = 3;
const COLUMNS = 5;

/** Tiers, and reasons, keep the tone that they got first. */
const tones = { hit: [], miss: [] };
function shapeOf(kind, name) {
  if (!tones[kind].includes(name)) tones[kind].push(name);
  return `${kind} tone-${tones[kind].indexOf(name) % 6}`;
}

/** Return the parts of a prompt in prefix order: { shape, name, tokens, text, advice }. */
function partsOf({ engine_tokens: engine = 0, hits, misses }) {
  const held = Array.isArray(hits) ? hits : Object.entries(hits);
  const parts = [
    { shape: "engine", name: "the engine's own cache", tokens: engine, text: `${count(engine)} in the engine's own cache` },
    ...held.map(([tier, tokens]) => ({ shape: shapeOf("hit", tier), name: tier, tokens, text: `${count(tokens)} from ${tier}` })),
    ...misses.map(({ reason, tokens, text, advice }) => ({ shape: shapeOf("miss", reason), name: reason, tokens, text, advice })),
  ];
  return parts.filter(({ tokens }) => tokens > 0);
}

/** A prompt as a bar: solid where it is held, striped where it is missing; and its parts as a list. */
class PromptBar {
  node = make("div", { class: "prompt-bar", role: "img" });
  list = make("ul", { class: "prompt-parts" });

  draw(report) {
    const parts = partsOf(report);
    const what = `Prompt of ${pluralize(report.tokens, "token")}`;
    this.node.setAttribute("aria-label", [what, parts.map(({ text }) => text).join("; ")].join(": "));
    this.node.replaceChildren(...parts.map((part) => segment(part)));
    this.list.replaceChildren(...parts.map((part) => line(part)));
    if (report.text) this.list.append(make("li", {}, make("q", {}, report.text)));
  }
}

function segment({ shape, tokens, text }) {
  const node = make("span", { class: shape, title: text });
  node.style.flexGrow = tokens;
  return node;
}

function line({ shape, text, advice }) {
  const more = advice ? [make("span", { class: "quiet" }, ` ${advice}`)] : [];
  return make("li", {}, make("span", { class: `swatch ${shape}`, "aria-hidden": "true" }), text, ...more);
}

/** Return what the shapes in the bars of some prompts mean, those that are held first. */
function legend(reports) {
  const shapes = new Map(reports.flatMap(partsOf).map(({ shape, name }) => [name, shape]));
  return [...shapes].sort(([, one], [, other]) => one.localeCompare(other)).map(([text, shape]) => line({ shape, text }));
}

/** Return a sentence that names the instances that have not answered: { instance: reason }. */
function notAnswered(unanswered) {
  const names = Object.keys(unanswered);
  if (!names.length) return "";
  const some = names.slice(0, MAX_NAMED).map((name) => `${name} (${unanswered[name]})`).join(", ");
  const more = names.length > MAX_NAMED ? ` and ${count(names.length - MAX_NAMED)} more` : "";
  return `Not answered: ${some}${more}.`;
}

/** What each instance holds of a prompt now. */
export class PromptAtInstances {
  #rows = make("div", { class: "prompts" });
  #more = make("p", { class: "quiet" });
  #problem = make("p", { class: "problem", role: "status" });
  node = make("section", { hidden: "" }, make("h3", {}, "What is held, and why not the rest"), this.#rows, this.#more, this.#problem);

  constructor(api) {
    this.api = api;
  }

  /** Ask for a prompt. `isCurrent` returns false once another one was asked for. */
  async load(body, isCurrent) {
    try {
      const { prompts, unanswered } = await this.api.post("why", body);
      if (!isCurrent()) return;
      this.#rows.replaceChildren(...prompts.slice(0, MAX_INSTANCES).map((prompt) => this.#row(prompt)));
      const rest = prompts.length - MAX_INSTANCES;
      setText(this.#more, [rest > 0 ? `… and ${pluralize(rest, "more instance")}.` : "", notAnswered(unanswered)].join(" ").trim());
      setText(this.#problem, "");
    } catch (error) {
      if (!isCurrent()) return;
      this.#rows.replaceChildren();
      setText(this.#problem, error.message);
    }
    this.node.hidden = !(this.#rows.children.length || this.#more.textContent || this.#problem.textContent);
  }

  #row(prompt) {
    const bar = new PromptBar();
    bar.draw(prompt);
    return make("div", {}, make("p", {}, make("b", {}, prompt.instance)), bar.node, bar.list);
  }
}

/** The last requests of all instances, and where prompts part. */
export class Requests {
  #rows = new Map();
  #open = new Set();
  #loadedAt = 0;

  constructor(api) {
    this.api = api;
    byId("why-filter").addEventListener("change", () => this.load());
  }

  draw() {
    if (!document.hidden && Date.now() / 1000 - this.#loadedAt >= REFRESH_SECONDS) this.load();
  }

  async load() {
    this.#loadedAt = Date.now() / 1000;
    const request = byId("why-filter").value.trim();
    try {
      const answer = await this.api.get(`why?last=${LAST}&request=${encodeURIComponent(request)}`);
      if (request !== byId("why-filter").value.trim()) return; // Others are being loaded.
      this.#show(answer, request);
    } catch (error) {
      setText(byId("why-more"), error.message);
    }
  }

  #show({ requests, breakers, unanswered }, request) {
    const keys = requests.map(({ instance, request: id, at }) => JSON.stringify([instance, id, at]));
    for (const key of this.#rows.keys()) if (!keys.includes(key)) this.#rows.delete(key);
    requests.forEach((report, number) => {
      if (!this.#rows.has(keys[number])) this.#rows.set(keys[number], new RequestRow(report, () => this.#toggle(keys[number])));
    });
    this.#arrange(keys);
    byId("why-table").hidden = !requests.length;
    byId("why-legend").replaceChildren(...legend(requests));
    const none = request ? "No request has such an id." : "No request was looked up since the instances started.";
    setText(byId("why-more"), [requests.length ? "" : none, notAnswered(unanswered)].join(" ").trim());
    byId("breakers").replaceChildren(...breakers.slice(0, MAX_BREAKERS).map((breaker) => place(breaker)));
    byId("breakers-part").hidden = !breakers.length;
  }

  #toggle(key) {
    if (!this.#open.delete(key)) this.#open.add(key);
    this.#arrange([...this.#rows.keys()]);
  }

  #arrange(keys) {
    for (const key of this.#open) if (!this.#rows.has(key)) this.#open.delete(key);
    this.#rows = new Map(keys.map((key) => [key, this.#rows.get(key)]));
    arrange(byId("why-rows"), keys.flatMap((key) => this.#rows.get(key).nodes(this.#open.has(key))));
  }
}

class RequestRow {
  constructor(report, onToggle) {
    const { request, instance, at, tokens } = report;
    const bar = new PromptBar();
    bar.draw(report);
    this.button = make("button", { type: "button", class: "link toggle" }, request);
    this.button.addEventListener("click", onToggle);
    this.node = row(
      this.button,
      [
        cell("Instance", {}, instance),
        cell("Time", { class: "numbers" }, clock(at)),
        cell("Tokens", { class: "numbers" }, count(tokens)),
        cell("Held and missed", { class: "wide" }, bar.node),
      ],
      { class: "request" },
    );
    this.detail = make("tr", { class: "detail-row", role: "row" }, make("td", { colspan: COLUMNS, role: "cell" }, bar.list));
  }

  nodes(open) {
    this.button.setAttribute("aria-expanded", open);
    return open ? [this.node, this.detail] : [this.node];
  }
}

/** Describe a place at which prompts part. */
function place({ position, parted, passed, again, tokens_per_day: tokens, seconds_per_day: seconds, text }) {
  const same = again ? `; ${percent(again / parted)} of these go on with the same text` : "";
  const costs = `${compact(tokens)} tokens a day${seconds ? `, ${amount(seconds)} of prefill` : ""}`;
  const what = `${percent(parted / passed)} of ${pluralize(passed, "prompt")} that begin alike part at token ${count(position)}${same}: ${costs}.`;
  return make("li", {}, what, ...(text ? [make("q", {}, text)] : []));
}
