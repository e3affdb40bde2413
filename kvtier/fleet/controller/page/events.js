// The list of events, with their progress and results.

import { sentence } from "./api.js";
import { Bar, arrange, byId, make, setText } from "./dom.js";
import { age, bytes, clock, count, elapsed, place, pluralize } from "./format.js";
import { isUnfinished } from "./store.js";

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
    const running = events.filter(isUnfinished).length;
    setText(byId("activity-summary"), running ? `${running} in progress` : "");
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
      make("p", { class: "way" }, ...route(event)),
      this.bar.node,
      this.#detail,
    );
  }

  draw(event, now) {
    this.node.dataset.state = event.state;
    setText(this.#state, event.state);
    setText(this.#when, when(event, now));
    this.bar.node.hidden = event.state !== "running";
    this.bar.set(event.chunks ? event.chunks_done / event.chunks : 0, progress(event));
    setText(this.#detail, outcome(event));
  }
}

/** Return the source and target as nodes. */
function route({ source, target }) {
  const ends = [source, target].filter(Boolean).map((end) => make("span", { class: "place" }, place(end)));
  return ends.length === 2 ? [ends[0], make("span", { class: "arrow" }, " → "), ends[1]] : ends;
}

function when(event, now) {
  const from = event.started_at ?? event.created_at;
  if (isUnfinished(event)) return `${clock(event.created_at)}, for ${age(now - from)}`;
  return `${clock(event.created_at)}, ${elapsed(event.ended_at - from)}`;
}

/** Return the progress as text. */
export function progress(event) {
  const size = event.bytes_done ? `, ${bytes(event.bytes_done)}` : "";
  return `${event.chunks_done} of ${pluralize(event.chunks, "chunk")}${size}`;
}

/** Return the state and, at the end, the result as a sentence. */
export function outcome(event) {
  const amount = event.num_tokens ? pluralize(event.num_tokens, "token") : "all chunks";
  if (event.state === "failed") return `Failed: ${sentence(event.error ?? "unknown reason")}`;
  if (event.state === "queued") return `Queued: ${amount}.`;
  if (event.state === "running") return `${pluralize(event.num_tokens, "token")}, ${progress(event)}.`;
  return done(event);
}

function done({ kind, num_tokens: requested, chunks, result }) {
  if (!chunks && !result.chunks) return "Nothing to do: no chunk of it is held there.";
  const size = result.bytes ? `, ${bytes(result.bytes)}` : "";
  const part = result.tokens < requested ? `${count(result.tokens)} of ` : "";
  // A clear without a prompt counts chunks only.
  const what = requested ? part + pluralize(requested, "token") : pluralize(result.chunks, "chunk");
  const pins = result.unpinned && kind !== "unpin" ? `, ${count(result.unpinned)} of its pinned chunks unpinned` : "";
  const text = `${what} ${PAST[kind] ?? "done"}${size}${pins}`;
  return result.reason ? `${text}: ${sentence(result.reason)}` : `${text}.`;
}
