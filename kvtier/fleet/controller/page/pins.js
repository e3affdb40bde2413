// What is pinned on an instance. Loaded again when the number of pinned chunks changes.

import { make, setText } from "./dom.js";
import { count, moment, pluralize } from "./format.js";

const MAX_LISTED = 10;

export class Pins {
  #list = make("ul", { class: "quiet numbers" });
  #problem = make("p", { class: "problem", role: "status" });
  /** The number of pinned chunks that is shown or being loaded. */
  #shown = 0;

  constructor(id, api) {
    this.id = id;
    this.api = api;
    this.node = make("section", { class: "pins", hidden: "" }, make("h4", {}, "Pins"), this.#list, this.#problem);
  }

  draw({ pinned = 0 }) {
    this.node.hidden = !pinned;
    if (this.#shown === pinned) return;
    this.#shown = pinned;
    if (pinned) this.#load(pinned);
  }

  async #load(wanted) {
    try {
      const answer = await this.api.get(`pins?instance=${encodeURIComponent(this.id)}&limit=${MAX_LISTED}`);
      if (this.#shown !== wanted) return; // A later one is being loaded.
      this.#list.replaceChildren(...lines(answer).map((text) => make("li", {}, text)));
      setText(this.#problem, "");
    } catch (error) {
      setText(this.#problem, error.message);
    }
  }
}

function lines({ pins, total }) {
  const listed = pins.map(({ chunks, held, until }) => {
    const part = held < chunks ? `, of which it holds ${count(held)}` : "";
    return `${pluralize(chunks, "chunk")}${part}, until ${until === null ? "unpinned" : moment(until)}`;
  });
  return total > pins.length ? [...listed, `and ${pluralize(total - pins.length, "more pin")}`] : listed;
}
