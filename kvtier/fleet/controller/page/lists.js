// Lists about the whole fleet that are loaded now and then: peers, pins, and what could be changed.

import { arrange, byId, cell, row, setText } from "./dom.js";
import { bytes, count, moment, percent, pluralize, throughput } from "./format.js";

const REFRESH_SECONDS = 15;
const LIMIT = 12;

/** What is listed: where it is loaded from, its rows, and the text below them. */
const LISTS = {
  peers: {
    path: `peers?limit=${LIMIT}`,
    rows: ({ peers }) => peers,
    cells: ({ instance, address, peer, state, read_bytes: read, bytes_per_second: speed }) => [
      `${instance} ← ${peer || address}`,
      ["State", state],
      ["Fetched", bytes(read)],
      ["Speed", speed ? throughput(speed) : "-"],
    ],
    more: ({ peers, total }) => rest(peers, total, "connection"),
    empty: "No instance fetches from another one.",
  },
  pins: {
    path: `pins?limit=${LIMIT}`,
    rows: ({ pins }) => pins,
    cells: ({ instance, chunks, held, pinned_at: since, until }) => [
      instance,
      ["Chunks", count(chunks)],
      ["Held", percent(chunks ? held / chunks : 0)],
      ["Pinned", moment(since)],
      ["Until", until === null ? "unpinned" : moment(until)],
    ],
    more: ({ pins, total }) => rest(pins, total, "pin"),
    empty: "Nothing is pinned. Look up a prompt to pin it.",
  },
  improvements: {
    path: `whatif?limit=${LIMIT}`,
    rows: ({ improvements }) => improvements,
    cells: ({ instance, change }) => [instance, ["Change", change, "wide"]],
    more: ({ improvements, estimating }) => (improvements.length ? `Estimated by ${pluralize(estimating, "instance")}: open one for its curves.` : ""),
    empty: "No instance has an estimate yet that would change anything.",
  },
};

const rest = (shown, total, name) => (total > shown.length ? `… and ${pluralize(total - shown.length, `more ${name}`)}` : "");

export class Lists {
  #loadedAt = 0;

  constructor(api) {
    this.api = api;
  }

  draw() {
    if (!document.hidden && Date.now() / 1000 - this.#loadedAt >= REFRESH_SECONDS) this.load();
  }

  async load() {
    this.#loadedAt = Date.now() / 1000;
    for (const [name, list] of Object.entries(LISTS)) {
      try {
        this.#show(name, list, await this.api.get(list.path));
      } catch (error) {
        setText(byId(`${name}-more`), error.message);
      }
    }
  }

  #show(name, list, answer) {
    const rows = list.rows(answer);
    byId(`${name}-table`).hidden = !rows.length;
    setText(byId(`${name}-more`), rows.length ? list.more(answer) : list.empty);
    const drawn = rows.map((each) => {
      const [head, ...cells] = list.cells(each);
      return row(head, cells.map(([label, text, shape = "numbers"]) => cell(label, { class: shape }, text)));
    });
    arrange(byId(`${name}-rows`), drawn);
  }
}
