// What the controller tells as it happens: server-sent events, read with fetch, since EventSource can carry no
// token. Connects again by itself, later each time, and says how it is.

import { ApiError } from "./api.js";

const FIRST_DELAY = 0.5;
const LONGEST_DELAY = 15;
// The controller says something every 10 seconds.
const SILENCE = 25;
// Milliseconds by which two clocks may differ and be taken for equal.
const SLACK = 2000;
const LONGEST_MESSAGE = 16 * 1024 * 1024;

/** Cuts a text that comes in pieces into its events. */
export class Parser {
  #rest = "";
  #name = "message";
  #data = [];

  /** The events that this piece completes, as [name, data]. */
  take(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    if (this.#rest.length > LONGEST_MESSAGE) throw new ApiError("The controller sent more than this page takes.");
    const complete = [];
    for (const line of lines) {
      const event = this.#line(line.endsWith("\r") ? line.slice(0, -1) : line);
      if (event) complete.push(event);
    }
    return complete;
  }

  #line(line) {
    if (line === "") {
      const event = this.#data.length ? [this.#name, this.#data.join("\n")] : null;
      this.#name = "message";
      this.#data = [];
      return event;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "event") this.#name = value;
    else if (field === "data") this.#data.push(value);
    return null;
  }
}

export class Stream {
  /**
   * `on.state(state, detail)` is told "connecting", "live" (with how many seconds the controller's clock is
   * ahead), "lost" (with the reason, an error, and when the next try is) and "unauthorised"; `on.message(name,
   * value)` is told what comes.
   */
  constructor(api, on) {
    this.api = api;
    this.on = on;
    this.failures = 0;
    this.timer = null;
    this.connecting = null;
    addEventListener("online", () => this.retry());
    document.addEventListener("visibilitychange", () => document.hidden || this.retry());
  }

  /** Try at once where it waits to try again. */
  retry() {
    if (this.timer !== null) this.connect();
  }

  /** Connect anew, whatever there was before. */
  async connect() {
    clearTimeout(this.timer);
    this.timer = null;
    this.connecting?.abort();
    const connecting = (this.connecting = new AbortController());
    this.on.state("connecting");
    const error = await this.#listen(connecting).catch((thrown) => thrown);
    if (connecting !== this.connecting) return;
    connecting.abort();
    if (error.status === 401) this.on.state("unauthorised");
    else this.#later(error);
  }

  /** Tell what comes until there is no more; returns, or throws, why that is. */
  async #listen(connecting) {
    const silence = { timer: null };
    const heard = () => {
      clearTimeout(silence.timer);
      silence.timer = setTimeout(() => connecting.abort(new ApiError("The controller has gone silent.")), 1000 * SILENCE);
    };
    heard();
    try {
      const asked = Date.now();
      const answer = await this.api.open("stream", { signal: connecting.signal });
      this.on.state("live", skew(answer, asked));
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      const parser = new Parser();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return new ApiError("The controller has closed the connection.");
        heard();
        this.failures = 0;
        for (const [name, data] of parser.take(value)) this.on.message(name, JSON.parse(data));
      }
    } finally {
      clearTimeout(silence.timer);
    }
  }

  #later(error) {
    // A little at random, so that the pages of a whole team do not come back in the same moment.
    const delay = Math.min(LONGEST_DELAY, FIRST_DELAY * 2 ** this.failures) * (0.8 + 0.4 * Math.random());
    this.failures += 1;
    this.timer = setTimeout(() => this.connect(), 1000 * delay);
    this.on.state("lost", { reason: error, next: Date.now() / 1000 + delay });
  }
}

/** Seconds that the controller's clock is ahead of this one, for sure: its header has whole seconds only, and was
 * written at some time between the question and now. */
function skew(answer, asked) {
  const there = Date.parse(answer.headers.get("Date") ?? "");
  if (there > Date.now() + SLACK) return (there - Date.now()) / 1000;
  return there < asked - SLACK ? (there - asked) / 1000 : 0;
}
