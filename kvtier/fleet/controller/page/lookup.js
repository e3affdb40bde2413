// The lookup form, and the places that hold a prefix of the prompt.

import { Actions } from "./actions.js";
import { Bar, byId, make, setOptions, setText } from "./dom.js";
import { count, percent, pluralize } from "./format.js";
import { PromptAtInstances } from "./why.js";

const MAX_ROWS = 50;
const MAX_TOKEN = 2 ** 32 - 1;
const TEXTS = {
  prompt: {
    label: "Prompt, as sent to the engine",
    hint: "An instance that serves the model tokenizes it. Chat templates are not applied.",
  },
  messages: {
    label: "Chat messages, as sent to the engine",
    hint: "A JSON list. An instance that serves the model applies its chat template.",
  },
  tokens: { label: "Token ids", hint: "Integers, separated by commas or spaces." },
};

export class Lookup {
  #form = byId("look-up-form");
  #found = byId("found");
  #head = make("p", { class: "found-head numbers" });
  #rows = make("fieldset", { class: "holders" });
  /** The last lookup: { body, answer, chosen }. */
  #result = null;
  /** Number of lookups sent: responses to any but the last one are ignored. */
  #sent = 0;

  constructor(store, api) {
    this.store = store;
    this.api = api;
    this.actions = new Actions(store, api, () => this.#refresh());
    this.why = new PromptAtInstances(api);
    this.#found.append(this.#head, this.#rows, this.why.node, this.actions.node);
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.#form.addEventListener("change", () => this.#drawForm());
    byId("text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#form.requestSubmit();
    });
    this.#drawForm();
  }

  /** Redraw everything that depends on the connected instances. */
  draw() {
    const { models } = this.store;
    const only = models.length === 1 ? models[0] : "the only model served";
    setOptions(byId("model"), [["", only], ...(models.length > 1 ? models.map((name) => [name, name]) : [])]);
    this.actions.draw();
  }

  #drawForm() {
    const { label, hint } = TEXTS[this.#form.elements.form.value];
    setText(byId("text-label"), label);
    setText(byId("text-hint"), hint);
  }

  async #submit() {
    const outcome = byId("look-up-outcome");
    outcome.dataset.state = "";
    byId("text").removeAttribute("aria-invalid");
    let body;
    try {
      body = this.#body();
    } catch (error) {
      byId("text").setAttribute("aria-invalid", "true");
      byId("text").focus();
      outcome.dataset.state = "failed";
      setText(outcome, error.message);
      return;
    }
    const number = (this.#sent += 1);
    setText(outcome, "Looking up …");
    try {
      const answer = await this.api.post("lookup", body);
      if (number !== this.#sent) return;
      setText(outcome, "");
      this.#show(body, answer, number);
    } catch (error) {
      if (number !== this.#sent) return;
      this.#found.hidden = true;
      outcome.dataset.state = "failed";
      setText(outcome, error.message);
    }
  }

  /** Return the request body for the form. Throws an error with a message for the user. */
  #body() {
    const body = READ[this.#form.elements.form.value](byId("text").value);
    if (body.prompt === "") throw new Error("Enter a prompt.");
    if (byId("model").value) body.model = byId("model").value;
    if (byId("salt").value) body.salt = byId("salt").value;
    return body;
  }

  /** Repeat the last lookup after an operation. On an error the old result stays. */
  async #refresh() {
    if (!this.#result) return;
    const { body } = this.#result;
    const number = (this.#sent += 1);
    const answer = await this.api.post("lookup", body).catch(() => null);
    if (answer && number === this.#sent) this.#show(body, answer, number);
  }

  #show(body, answer, number) {
    const places = held(answer);
    const chosen = this.#result?.chosen;
    this.#result = { body: { ...body, model: answer.model }, answer, chosen };
    this.#found.hidden = false;
    this.why.load(this.#result.body, () => number === this.#sent);
    const longest = places[0]?.tokens ?? 0;
    const some = `The first ${count(longest)} (${percent(longest / answer.num_tokens)}) are held.`;
    const most = longest === answer.num_tokens ? "All of them are held." : some;
    setText(this.#head, `${pluralize(answer.num_tokens, "token")} for ${answer.model}.${longest ? ` ${most}` : ""}`);
    const hadFocus = this.#rows.contains(document.activeElement);
    this.#rows.replaceChildren(...this.#drawn(places, answer.num_tokens));
    const same = places.find((place) => chosen && key(place) === key(chosen));
    this.#choose(same ?? places[0]);
    if (hadFocus) this.#rows.querySelector(":checked")?.focus();
  }

  #drawn(places, length) {
    if (!places.length) {
      const text = "No instance holds any of it. Send the prompt to an engine first, or check model and salt.";
      return [make("p", { class: "empty" }, text)];
    }
    const rows = places.slice(0, MAX_ROWS).map((place) => this.#row(place, length));
    const more = places.length - rows.length;
    if (more) rows.push(make("p", { class: "quiet" }, `… and ${pluralize(more, "more place")} with less of it.`));
    return [make("legend", {}, "Held by"), ...rows];
  }

  #row(place, length) {
    const input = make("input", { type: "radio", name: "place", value: key(place) });
    input.addEventListener("change", () => this.#choose(place));
    const bar = new Bar(`Held by ${place.instance}, tier ${place.tier}`);
    bar.set(place.tokens / length, `${count(place.tokens)} of ${pluralize(length, "token")}`);
    return make(
      "label",
      { class: "holder" },
      input,
      make("span", { class: "holder-name" }, make("b", {}, place.instance), ` · ${place.tier}`),
      make("span", { class: "holder-numbers numbers" }, `${count(place.tokens)} tokens`),
      bar.node,
    );
  }

  #choose(place) {
    this.#result.chosen = place;
    for (const input of this.#rows.querySelectorAll("input")) input.checked = place && input.value === key(place);
    this.actions.setPlace(place ?? null, this.#result.body);
  }
}

const key = ({ instance, tier }) => JSON.stringify([instance, tier]);

/** Return the places of a response, those with the most tokens first. */
function held(answer) {
  const places = Object.entries(answer.instances).flatMap(([instance, tiers]) =>
    Object.entries(tiers).map(([tier, tokens]) => ({ instance, tier, tokens })),
  );
  return places.sort((a, b) => b.tokens - a.tokens);
}

/** How each form of a prompt is read into fields of a request. */
const READ = {
  prompt: (text) => ({ prompt: text }),
  messages: (text) => ({ messages: messages(text) }),
  tokens: (text) => ({ tokens: tokenIds(text) }),
};

function messages(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error("Enter a JSON list of chat messages.");
  }
}

/** Parse token ids. Throws an error that names the first invalid one. */
function tokenIds(text) {
  const words = text.replace(/^\s*\[|\]\s*$/g, " ").split(/[\s,]+/).filter(Boolean);
  if (!words.length) throw new Error("Enter token ids.");
  return words.map((word) => {
    const id = /^\d+$/.test(word) ? Number(word) : NaN;
    if (!(id <= MAX_TOKEN)) {
      throw new Error(`“${word.slice(0, 20)}” is not a token id: token ids are integers from 0 to ${count(MAX_TOKEN)}.`);
    }
    return id;
  });
}
