// The controller's stream of server-sent events, read with fetch because EventSource cannot send a token.
// Reconnects automatically with exponential back-off, and reports its state.

import { ApiError } from "./api.js";

const FIRST_DELAY = 0.5;
const MAX_DELAY = 15;
// Seconds without data. The controller sends a list of instances every 10 seconds.
const IDLE_TIMEOUT = 25;
// Milliseconds of clock difference to ignore.
const SLACK = 2000;
const MAX_MESSAGE = 16 * 1024 * 1024;

/** Incremental parser for server-sent events. */
export class Parser {
  #rest = "";
  #name = "message";
  #data = [];

  /** Parse the next piece of text. Return the events that it completes, as [name, data]. */
  take(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    if (this.#rest.length > MAX_MESSAGE) throw new ApiError("The controller sent a message that is too long.");
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
   * `on.state(state, detail)` is called with "connecting", "live" (and the seconds by which the controller's
   * clock is ahead), "lost" (and `reason`, an error, and `next`, the time of the next retry) and "unauthorised".
   * `on.message(name, value)` is called with each message.
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

  /** Skip the back-off, if one is pending. */
  retry() {
    if (this.timer !== null) this.connect();
  }

  /** Connect, and abort the previous connection, if any. */
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
    else this.#scheduleRetry(error);
  }

  /** Report messages until the connection ends. Returns or throws the reason, an error. */
  async #listen(connecting) {
    const idle = { timer: null };
    const onIdle = () => connecting.abort(new ApiError("The controller has stopped sending data."));
    const restartTimer = () => {
      clearTimeout(idle.timer);
      idle.timer = setTimeout(onIdle, 1000 * IDLE_TIMEOUT);
    };
    restartTimer();
    try {
      const sentAt = Date.now();
      const answer = await this.api.open("stream", { signal: connecting.signal });
      this.on.state("live", skew(answer, sentAt));
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      const parser = new Parser();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return new ApiError("The controller has closed the connection.");
        restartTimer();
        this.failures = 0;
        for (const [name, data] of parser.take(value)) this.on.message(name, JSON.parse(data));
      }
    } finally {
      clearTimeout(idle.timer);
    }
  }

  #scheduleRetry(error) {
    // Jitter, so that many pages do not reconnect at the same moment.
    const delay = Math.min(MAX_DELAY, FIRST_DELAY * 2 ** this.failures) * (0.8 + 0.4 * Math.random());
    this.failures += 1;
    this.timer = setTimeout(() => this.connect(), 1000 * delay);
    this.on.state("lost", { reason: error, next: Date.now() / 1000 + delay });
  }
}

/** Return a lower bound of the seconds by which the controller's clock is ahead of this one: its Date header has
 * whole seconds only, and was written some time between the request and now. */
function skew(answer, sentAt) {
  const there = Date.parse(answer.headers.get("Date") ?? "");
  if (there > Date.now() + SLACK) return (there - Date.now()) / 1000;
  return there < sentAt - SLACK ? (there - sentAt) / 1000 : 0;
}
