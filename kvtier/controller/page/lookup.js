// A prompt, and who holds how much of its beginning.

import { Actions } from "./actions.js";
import { Bar, byId, make, offer, say } from "./dom.js";
import { count, many, percent } from "./format.js";

const MOST_ROWS = 50;
const HIGHEST_TOKEN = 2 ** 32 - 1;
const TEXTS = {
  prompt: {
    label: "Prompt, as the engine gets it",
    hint: "An instance that serves the model turns it into token ids. Chat templates are not applied.",
  },
  tokens: { label: "Token ids", hint: "Whole numbers, with commas or spaces between them." },
};

export class LookUp {
  #form = byId("look-up-form");
  #found = byId("found");
  #head = make("p", { class: "found-head numbers" });
  #rows = make("fieldset", { class: "holders" });
  /** What was looked up last and found: { body, answer, chosen }. */
  #result = null;
  /** Counts the look-ups: an answer to one that was followed by another does not matter any more. */
  #asked = 0;

  constructor(store, api) {
    this.store = store;
    this.api = api;
    this.actions = new Actions(store, api, () => this.#again());
    this.#found.append(this.#head, this.#rows, this.actions.node);
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

  /** What depends on who is connected. */
  draw() {
    const { models } = this.store;
    const only = models.length === 1 ? models[0] : "the only one that is served";
    offer(byId("model"), [["", only], ...(models.length > 1 ? models.map((name) => [name, name]) : [])]);
    this.actions.draw();
  }

  #drawForm() {
    const { label, hint } = TEXTS[this.#form.elements.form.value];
    say(byId("text-label"), label);
    say(byId("text-hint"), hint);
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
      say(outcome, error.message);
      return;
    }
    const number = (this.#asked += 1);
    say(outcome, "Looking …");
    try {
      const answer = await this.api.post("lookup", body);
      if (number !== this.#asked) return;
      say(outcome, "");
      this.#show(body, answer);
    } catch (error) {
      if (number !== this.#asked) return;
      this.#found.hidden = true;
      outcome.dataset.state = "failed";
      say(outcome, error.message);
    }
  }

  /** What the form says, as the controller is to be asked. Throws what is wrong with it. */
  #body() {
    const text = byId("text").value;
    const body = this.#form.elements.form.value === "prompt" ? { prompt: text } : { tokens: tokenIds(text) };
    if (body.prompt === "") throw new Error("Write the prompt first.");
    if (byId("model").value) body.model = byId("model").value;
    if (byId("salt").value) body.salt = byId("salt").value;
    return body;
  }

  /** Ask the same again, for what has been done has changed it. What cannot be had stays as it was. */
  async #again() {
    if (!this.#result) return;
    const { body } = this.#result;
    const number = (this.#asked += 1);
    const answer = await this.api.post("lookup", body).catch(() => null);
    if (answer && number === this.#asked) this.#show(body, answer);
  }

  #show(body, answer) {
    const places = held(answer);
    const chosen = this.#result?.chosen;
    this.#result = { body: { ...body, model: answer.model }, answer, chosen };
    this.#found.hidden = false;
    const longest = places[0]?.tokens ?? 0;
    const some = `The first ${count(longest)} (${percent(longest / answer.num_tokens)}) are held.`;
    const most = longest === answer.num_tokens ? "All of them are held." : some;
    say(this.#head, `${many(answer.num_tokens, "token")} for ${answer.model}.${longest ? ` ${most}` : ""}`);
    const hadFocus = this.#rows.contains(document.activeElement);
    this.#rows.replaceChildren(...this.#drawn(places, answer.num_tokens));
    const same = places.find((place) => chosen && key(place) === key(chosen));
    this.#choose(same ?? places[0]);
    if (hadFocus) this.#rows.querySelector(":checked")?.focus();
  }

  #drawn(places, length) {
    if (!places.length) {
      const text = "No instance holds any of it. Send the prompt to an engine first, or look whether model and salt are right.";
      return [make("p", { class: "empty" }, text)];
    }
    const rows = places.slice(0, MOST_ROWS).map((place) => this.#row(place, length));
    const more = places.length - rows.length;
    if (more) rows.push(make("p", { class: "quiet" }, `… and ${many(more, "more place")} with less of it.`));
    return [make("legend", {}, "Held by"), ...rows];
  }

  #row(place, length) {
    const input = make("input", { type: "radio", name: "place", value: key(place) });
    input.addEventListener("change", () => this.#choose(place));
    const bar = new Bar(`Held by ${place.instance}, tier ${place.tier}`);
    const words = `${count(place.tokens)} of ${many(length, "token")}`;
    bar.set(place.tokens / length, words);
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
    this.actions.offer(place ?? null, this.#result.body);
  }
}

const key = ({ instance, tier }) => JSON.stringify([instance, tier]);

/** The places of an answer, those that hold most first. */
function held(answer) {
  const places = Object.entries(answer.instances).flatMap(([instance, tiers]) =>
    Object.entries(tiers).map(([tier, tokens]) => ({ instance, tier, tokens })),
  );
  return places.sort((a, b) => b.tokens - a.tokens);
}

/** The numbers in a text. Throws what is wrong, naming the first that is none. */
function tokenIds(text) {
  const words = text.replace(/^\s*\[|\]\s*$/g, " ").split(/[\s,]+/).filter(Boolean);
  if (!words.length) throw new Error("Write the token ids first.");
  return words.map((word) => {
    const id = /^\d+$/.test(word) ? Number(word) : NaN;
    if (!(id <= HIGHEST_TOKEN)) {
      throw new Error(`“${word.slice(0, 20)}” is no token id: these are whole numbers from 0 to ${count(HIGHEST_TOKEN)}.`);
    }
    return id;
  });
}
