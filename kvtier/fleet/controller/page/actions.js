// Form for operations on a prompt's chunks at one place, with their progress and result.

import { Bar, byId, make, setOptions, setText } from "./dom.js";
import { outcome, progress } from "./events.js";
import { place as named, pluralize } from "./format.js";
import { isUnfinished } from "./store.js";

const ACTIONS = ["Move", "Copy", "Pin", "Unpin", "Prefetch", "Clear"];
const DURATION = "Seconds, or a duration such as 10m or 2h.";

export class Actions {
  #choices = make("fieldset", { class: "segments" }, make("legend", { class: "hidden" }, "Operation"));
  #what = make("p", { class: "what numbers" });
  #instance = make("select", { id: "to-instance" });
  #tier = make("select", { id: "to-tier" });
  #seconds = make("input", { id: "seconds", type: "text", autocomplete: "off", inputmode: "text", "aria-describedby": "seconds-hint" });
  #secondsLabel = make("label", { for: "seconds" });
  #hint = make("p", { class: "hint warning" });
  #button = make("button", { type: "submit", class: "primary" });
  #outcome = make("p", { class: "outcome", role: "status" });
  #bar = new Bar("Progress", "progressbar");
  #place = null;
  #body = null;
  #unwatch = () => {};

  /** `onChange` is called after an operation has ended, which may have changed where chunks are held. */
  constructor(store, api, onChange) {
    this.store = store;
    this.api = api;
    this.onChange = onChange;
    ACTIONS.forEach((name, index) => {
      const input = make("input", { type: "radio", name: "action", value: name });
      input.checked = index === 0;
      this.#choices.append(make("label", {}, input, make("span", {}, name)));
    });
    this.fields = {
      instance: field(make("label", { for: "to-instance" }, "To instance"), this.#instance),
      tier: field(make("label", { for: "to-tier" }, "Tier"), this.#tier),
      seconds: field(this.#secondsLabel, this.#seconds, make("p", { class: "hint", id: "seconds-hint" }, DURATION)),
    };
    this.#bar.node.hidden = true;
    this.node = make(
      "form",
      { class: "actions", novalidate: "" },
      this.#choices,
      this.#what,
      make("div", { class: "pair" }, ...Object.values(this.fields)),
      this.#hint,
      make("div", { class: "submit" }, this.#button, this.#outcome),
      this.#bar.node,
    );
    this.node.addEventListener("change", ({ target }) => {
      if (target.name === "action") this.#reset();
      this.draw();
    });
    this.node.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
  }

  /** Set the place to act on and the prompt in `body`. Without a place the form is hidden. */
  setPlace(place, body) {
    this.#place = place;
    this.#body = body;
    this.draw();
  }

  /** Clear the result of the last operation when another one is chosen. The activity list still shows it. */
  #reset() {
    this.#unwatch();
    this.#setOutcome("", "");
  }

  get #action() {
    return this.node.elements.action.value;
  }

  /** Redraw everything that depends on the choices and on the connected instances. */
  draw() {
    const place = this.#place;
    for (const part of [this.#choices, this.#what, this.#button]) part.hidden = place === null;
    const action = this.#action;
    const moves = action === "Move" || action === "Copy";
    this.fields.instance.hidden = place === null || !moves;
    this.fields.tier.hidden = place === null || !(moves || action === "Prefetch");
    this.fields.seconds.hidden = place === null || !["Pin", "Prefetch"].includes(action);
    if (place === null) {
      setText(this.#hint, "");
      return;
    }
    this.#offerTargets(moves);
    setText(this.#secondsLabel, action === "Pin" ? "Duration (empty: no limit)" : "Deadline (empty: no limit)");
    setText(this.#what, `${pluralize(place.tokens, "token")} held by ${named([place.instance, place.tier])}`);
    setText(this.#button, action === "Clear" ? "Clear …" : action);
    setText(this.#hint, this.#warning(moves));
    this.#button.disabled = !this.fields.tier.hidden && !this.#tier.value;
  }

  #offerTargets(moves) {
    const { connected } = this.store;
    const { instance, tier } = this.#place;
    const others = connected.filter((other) => other.instance !== instance);
    const here = connected.filter((other) => other.instance === instance);
    if (moves) setOptions(this.#instance, [...others, ...here].map(({ instance: id }) => [id, id]));
    const id = moves ? this.#instance.value : instance;
    const tiers = this.store.instance(id)?.tiers ?? [];
    // The pseudo tier of peers cannot be a target.
    const targets = tiers.filter(({ name, type }) => type !== "peers" && (id !== instance || name !== tier));
    setOptions(this.#tier, targets.map(({ name, type }) => [name, name === type ? name : `${name} (${type})`]));
  }

  /** Return why the operation would fail, as far as that is known in advance, or "". */
  #warning(moves) {
    const from = this.store.instance(this.#place.instance);
    if (!from || from.disconnectedAt) return `${this.#place.instance} is disconnected.`;
    if (moves && this.#instance.value !== from.instance && !from.peer) {
      return `${from.instance} does not serve peers: set peer.listen in its settings.`;
    }
    if (!this.fields.tier.hidden && !this.#tier.value) return `${this.#instance.value || from.instance} has no other tier.`;
    return "";
  }

  async #submit() {
    const request = this.#request();
    if (this.#action === "Clear" && !(await confirmed(this.#place))) return;
    this.#unwatch();
    this.#setOutcome("", "Sending …");
    this.#button.disabled = true;
    try {
      const { event_id: id } = await this.api.post(...request);
      this.#follow(id);
    } catch (error) {
      this.#setOutcome("failed", error.message);
    } finally {
      this.#button.disabled = false;
    }
  }

  /** Return the path and body of the request. */
  #request() {
    const { instance, tier } = this.#place;
    const here = { ...this.#body, instance, tier };
    const seconds = this.#seconds.value.trim();
    switch (this.#action) {
      case "Pin":
        return ["pin", { ...here, ...(seconds && { ttl: duration(seconds) }) }];
      case "Unpin":
        return ["unpin", here];
      case "Prefetch":
        return ["prefetch", { ...here, tier: this.#tier.value, ...(seconds && { deadline: duration(seconds) }) }];
      case "Clear":
        return ["clear", here];
      default: {
        const positions = { old_position: [instance, tier], new_position: [this.#instance.value, this.#tier.value] };
        return ["move", { ...this.#body, ...positions, copy: this.#action === "Copy" }];
      }
    }
  }

  /** Show the progress of an event until it has ended. */
  #follow(id) {
    const show = (event) => {
      if (event.event_id !== id) return;
      // Screen readers announce this text, so it changes with the state only. The bar shows the progress.
      this.#setOutcome(event.state, event.state === "running" ? "Running …" : outcome(event));
      this.#bar.node.hidden = event.state !== "running";
      this.#bar.set(event.chunks ? event.chunks_done / event.chunks : 0, progress(event));
      if (isUnfinished(event)) return;
      this.#unwatch();
      this.onChange();
    };
    this.#setOutcome("queued", "Requested …");
    this.#unwatch = this.store.watch(show);
    const known = this.store.event(id);
    if (known) show(known);
  }

  #setOutcome(state, text) {
    this.#outcome.dataset.state = state;
    this.#bar.node.hidden = true;
    setText(this.#outcome, text);
  }
}

const field = (...parts) => make("div", { class: "field" }, ...parts);

/** A plain number is in seconds. */
const duration = (text) => (/^\d+(\.\d+)?$/.test(text) ? Number(text) : text);

/** Ask for confirmation to remove the chunks of the prompt from a place. */
function confirmed(place) {
  const dialog = byId("confirm-dialog");
  setText(
    byId("confirm-text"),
    `${pluralize(place.tokens, "token")} of this prompt will be removed from ${named([place.instance, place.tier])}. If no other place holds them, the engine must recompute them.`,
  );
  dialog.returnValue = "";
  dialog.showModal();
  byId("confirm-no").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
