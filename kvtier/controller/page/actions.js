// What can be done with a prompt's chunks at one place, and what has come of it.

import { Bar, byId, make, offer, say } from "./dom.js";
import { outcome, progress } from "./events.js";
import { many, place as named } from "./format.js";
import { underWay } from "./store.js";

const ACTIONS = ["Move", "Copy", "Pin", "Unpin", "Prefetch", "Clear"];
const DURATION = "A number of seconds, or such as 10m or 2h.";

export class Actions {
  #choices = make("fieldset", { class: "segments" }, make("legend", { class: "hidden" }, "What to do"));
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

  /** `onChange` is called when what was asked for has ended and may have changed who holds what. */
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
      if (target.name === "action") this.#forget();
      this.draw();
    });
    this.node.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
  }

  /** Offer to do something with what `place` holds of the prompt in `body`; with nothing where it is null. */
  offer(place, body) {
    this.#place = place;
    this.#body = body;
    this.draw();
  }

  /** What has come of the last action is no news beside the next one; the activity still shows it. */
  #forget() {
    this.#unwatch();
    this.#say("", "");
  }

  get #action() {
    return this.node.elements.action.value;
  }

  /** What depends on the choices and on who is connected. */
  draw() {
    const place = this.#place;
    for (const part of [this.#choices, this.#what, this.#button]) part.hidden = place === null;
    const action = this.#action;
    const moves = action === "Move" || action === "Copy";
    this.fields.instance.hidden = place === null || !moves;
    this.fields.tier.hidden = place === null || !(moves || action === "Prefetch");
    this.fields.seconds.hidden = place === null || !["Pin", "Prefetch"].includes(action);
    if (place === null) {
      say(this.#hint, "");
      return;
    }
    this.#offerTargets(moves);
    say(this.#secondsLabel, action === "Pin" ? "For how long, or empty for good" : "Within, or empty for as long as it takes");
    say(this.#what, `${many(place.tokens, "token")} held by ${named([place.instance, place.tier])}`);
    say(this.#button, action === "Clear" ? "Clear …" : action);
    say(this.#hint, this.#warning(moves));
    this.#button.disabled = !this.fields.tier.hidden && !this.#tier.value;
  }

  #offerTargets(moves) {
    const { connected } = this.store;
    const { instance, tier } = this.#place;
    const others = connected.filter((other) => other.instance !== instance);
    const here = connected.filter((other) => other.instance === instance);
    if (moves) offer(this.#instance, [...others, ...here].map(({ instance: id }) => [id, id]));
    const id = moves ? this.#instance.value : instance;
    const tiers = this.store.instance(id)?.tiers ?? [];
    // What peers hold is no place to bring anything to.
    const elsewhere = tiers.filter(({ name, type }) => type !== "peers" && (id !== instance || name !== tier));
    offer(this.#tier, elsewhere.map(({ name, type }) => [name, name === type ? name : `${name} (${type})`]));
  }

  /** What will keep it from succeeding, known beforehand. */
  #warning(moves) {
    const from = this.store.instance(this.#place.instance);
    if (!from || from.gone) return `${this.#place.instance} is not connected any more.`;
    if (moves && this.#instance.value !== from.instance && !from.peer) {
      return `${from.instance} serves no peers: set peer.listen in its settings.`;
    }
    if (!this.fields.tier.hidden && !this.#tier.value) return `${this.#instance.value || from.instance} has no other tier.`;
    return "";
  }

  async #submit() {
    const request = this.#request();
    if (this.#action === "Clear" && !(await confirmed(this.#place))) return;
    this.#unwatch();
    this.#say("", "Asking …");
    this.#button.disabled = true;
    try {
      const { event_id: id } = await this.api.post(...request);
      this.#follow(id);
    } catch (error) {
      this.#say("failed", error.message);
    } finally {
      this.#button.disabled = false;
    }
  }

  /** The call and its body. */
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

  /** Show how an event is, from what the stream has told and tells of it. */
  #follow(id) {
    const show = (event) => {
      if (event.event_id !== id) return;
      // Read out when it changes, not with every chunk: how far it is, the bar shows.
      this.#say(event.state, event.state === "running" ? "Under way …" : outcome(event));
      this.#bar.node.hidden = event.state !== "running";
      this.#bar.set(event.chunks ? event.chunks_done / event.chunks : 0, progress(event));
      if (underWay(event)) return;
      this.#unwatch();
      this.onChange();
    };
    this.#say("queued", "Asked for …");
    this.#unwatch = this.store.watch(show);
    const known = this.store.event(id);
    if (known) show(known);
  }

  #say(state, text) {
    this.#outcome.dataset.state = state;
    this.#bar.node.hidden = true;
    say(this.#outcome, text);
  }
}

const field = (...parts) => make("div", { class: "field" }, ...parts);

/** A plain number is one of seconds. */
const duration = (text) => (/^\d+(\.\d+)?$/.test(text) ? Number(text) : text);

/** Ask whether what a place holds of the prompt shall go. */
function confirmed(place) {
  const dialog = byId("confirm-dialog");
  say(
    byId("confirm-text"),
    `${many(place.tokens, "token")} of this prompt will be removed from ${named([place.instance, place.tier])}. If no other place holds them, the engine computes them again.`,
  );
  dialog.returnValue = "";
  dialog.showModal();
  byId("confirm-no").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
