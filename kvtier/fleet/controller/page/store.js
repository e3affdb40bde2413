// The state of the page. Written by the stream and by responses, read by the views.

export const DISCONNECTED_SECONDS = 120;
export const MAX_EVENTS = 100;
const ORDER = { queued: 0, running: 1, done: 2, failed: 2 };

export const byName = new Intl.Collator("en", { numeric: true }).compare;

/** Return whether an event is queued or running. */
export const isUnfinished = (event) => ORDER[event.state] < 2;

export class Store {
  #events = new Map();
  #instances = new Map();
  #listeners = new Set();
  /** Seconds by which the controller's clock is ahead of this one. */
  ahead = 0;
  /** Instances that have disconnected within an hour. */
  gone = [];
  /** Whether the first list of instances and of events has been received. */
  hasInstances = false;
  hasEvents = false;

  /** The controller's current time as a Unix timestamp. */
  get now() {
    return Date.now() / 1000 + this.ahead;
  }

  /** Connected and recently disconnected instances, sorted by id. */
  get instances() {
    return [...this.#instances.values()].sort((a, b) => byName(a.instance, b.instance));
  }

  get connected() {
    return this.instances.filter((instance) => !instance.disconnectedAt);
  }

  /** Events, newest first. */
  get events() {
    return [...this.#events.values()].sort((a, b) => b.created_at - a.created_at).slice(0, MAX_EVENTS);
  }

  instance(id) {
    return this.#instances.get(id);
  }

  /** Call `listener` with each changed event. Returns a function that removes it. */
  watch(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** The names of all models served. */
  get models() {
    return [...new Set(this.connected.flatMap((instance) => instance.models))].sort(byName);
  }

  /** Update from the list of connected instances. */
  takeInstances({ instances: list, gone = [] }) {
    this.hasInstances = true;
    this.gone = gone;
    const here = new Set(list.map(({ instance }) => instance));
    for (const instance of list) this.#instances.set(instance.instance, instance);
    for (const [id, instance] of this.#instances) {
      if (!here.has(id) && !instance.disconnectedAt) instance.disconnectedAt = this.now;
    }
  }

  /** Drop instances that disconnected some time ago. */
  dropDisconnected() {
    for (const [id, instance] of this.#instances) {
      const { disconnectedAt } = instance;
      if (disconnectedAt && this.now - disconnectedAt > DISCONNECTED_SECONDS) this.#instances.delete(id);
    }
  }

  /** Clear the events: they may be from a previous run of the controller. */
  clearEvents() {
    this.#events.clear();
    this.hasEvents = false;
  }

  takeEvents(list) {
    this.hasEvents = true;
    list.forEach((event) => this.takeEvent(event));
  }

  /** Update an event. A stale state does not overwrite a newer one. */
  takeEvent(event) {
    const known = this.#events.get(event.event_id);
    if (known && !isAhead(event, known)) return;
    this.#events.set(event.event_id, event);
    if (this.#events.size > 2 * MAX_EVENTS) this.#events = new Map(this.events.map((kept) => [kept.event_id, kept]));
    for (const listener of [...this.#listeners]) listener(event);
  }

  event(id) {
    return this.#events.get(id);
  }
}

function isAhead(event, known) {
  const step = ORDER[event.state] - ORDER[known.state];
  return step > 0 || (step === 0 && event.chunks_done >= known.chunks_done);
}
