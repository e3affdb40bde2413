// What was asked for, and what becomes of it.

import { stopped } from "./api.js";
import { Bar, arrange, byId, make, say } from "./dom.js";
import { age, bytes, clock, count, many, place, took } from "./format.js";
import { underWay } from "./store.js";

const NAMES = { move: "Move", copy: "Copy", prefetch: "Prefetch", pin: "Pin", unpin: "Unpin", clear: "Clear" };
const PAST = {
  move: "moved",
  copy: "copied",
  prefetch: "fetched",
  pin: "pinned",
  unpin: "unpinned",
  clear: "removed",
};

export class Events {
  #rows = new Map();

  constructor(store) {
    this.store = store;
  }

  draw() {
    const { events } = this.store;
    const rows = new Map(events.map((event) => [event.event_id, this.#rows.get(event.event_id) ?? new Row(event)]));
    this.#rows = rows;
    for (const event of events) rows.get(event.event_id).draw(event, this.store.now);
    arrange(byId("events"), [...rows.values()].map(({ node }) => node));
    byId("no-events").hidden = events.length > 0 || !this.store.hasEvents;
    const running = events.filter(underWay).length;
    say(byId("activity-summary"), running ? `${running} under way` : "");
  }
}

class Row {
  #state = make("span", { class: "badge" });
  #when = make("span", { class: "when quiet numbers" });
  #detail = make("p", { class: "detail numbers" });

  constructor(event) {
    const name = NAMES[event.kind] ?? event.kind;
    this.bar = new Bar(`Progress of ${name}`, "progressbar");
    this.node = make(
      "li",
      {},
      make("p", { class: "event-head" }, make("strong", {}, name), this.#state, this.#when),
      make("p", { class: "way" }, ...way(event)),
      this.bar.node,
      this.#detail,
    );
  }

  draw(event, now) {
    this.node.dataset.state = event.state;
    say(this.#state, event.state);
    say(this.#when, when(event, now));
    this.bar.node.hidden = event.state !== "running";
    this.bar.set(event.chunks ? event.chunks_done / event.chunks : 0, progress(event));
    say(this.#detail, outcome(event));
  }
}

/** From where to where, as nodes. */
function way({ source, target }) {
  const ends = [source, target].filter(Boolean).map((end) => make("span", { class: "place" }, place(end)));
  return ends.length === 2 ? [ends[0], make("span", { class: "arrow" }, " → "), ends[1]] : ends;
}

function when(event, now) {
  const from = event.started_at ?? event.created_at;
  if (underWay(event)) return `${clock(event.created_at)}, for ${age(now - from)}`;
  return `${clock(event.created_at)}, ${took(event.ended_at - from)}`;
}

/** How far it is. */
export function progress(event) {
  const size = event.bytes_done ? `, ${bytes(event.bytes_done)}` : "";
  return `${event.chunks_done} of ${many(event.chunks, "chunk")}${size}`;
}

/** What it is doing, or what has come of it, in a sentence. */
export function outcome(event) {
  const wanted = event.num_tokens ? many(event.num_tokens, "token") : "all that is held";
  if (event.state === "failed") return `Failed: ${stopped(event.error ?? "nobody knows why")}`;
  if (event.state === "queued") return `Waits for its turn: ${wanted}.`;
  if (event.state === "running") return `${many(event.num_tokens, "token")}, ${progress(event)}.`;
  return done(event);
}

function done({ kind, num_tokens: wanted, chunks, result }) {
  if (!chunks && !result.chunks) return "There was nothing to do: nothing of it is held there.";
  const size = result.bytes ? `, ${bytes(result.bytes)}` : "";
  const part = result.tokens < wanted ? `${count(result.tokens)} of ` : "";
  // A tier that was cleared of everything held chunks of prompts that nobody has named.
  const what = wanted ? part + many(wanted, "token") : many(result.chunks, "chunk");
  const text = `${what} ${PAST[kind] ?? "done"}${size}`;
  return result.reason ? `${text}: ${stopped(result.reason)}` : `${text}.`;
}
