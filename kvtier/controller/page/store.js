// All that the page knows. It is told by the stream and by answers; views read it when they draw.

export const GONE_SECONDS = 120;
export const MOST_EVENTS = 100;
const SAMPLE_SECONDS = 9.5;
const MOST_SAMPLES = 360;
const ORDER = { queued: 0, running: 1, done: 2, failed: 2 };

const byName = new Intl.Collator("en", { numeric: true }).compare;

/** Whether it is queued or running. */
export const underWay = (event) => ORDER[event.state] < 2;

export class Store {
  #events = new Map();
  #instances = new Map();
  #listeners = new Set();
  /** Seconds that the controller's clock is ahead. */
  ahead = 0;
  /** Whether the list of instances, or that of events, has come at all. */
  hasInstances = false;
  hasEvents = false;

  /** Seconds since 1970, as the controller has them. */
  get now() {
    return Date.now() / 1000 + this.ahead;
  }

  /** Those that are connected, and for a while those that were, by their names. */
  get instances() {
    return [...this.#instances.values()].sort((a, b) => byName(a.instance, b.instance));
  }

  get connected() {
    return this.instances.filter((instance) => !instance.gone);
  }

  /** The newest first. */
  get events() {
    return [...this.#events.values()].sort((a, b) => b.created_at - a.created_at).slice(0, MOST_EVENTS);
  }

  instance(id) {
    return this.#instances.get(id);
  }

  /** Call with each event that changes, until the returned function is called. */
  watch(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** The names of all models that an instance serves. */
  get models() {
    return [...new Set(this.connected.flatMap((instance) => instance.models))].sort(byName);
  }

  /** Take the list of the connected instances; returns those that have registered since the last one. */
  takeInstances(list) {
    this.hasInstances = true;
    const fresh = [];
    const here = new Set();
    for (const instance of list) {
      const before = this.#instances.get(instance.instance);
      here.add(instance.instance);
      const same = before && !before.gone && before.registered_at === instance.registered_at;
      if (!same) fresh.push(instance.instance);
      const history = same ? before.history : [];
      this.#instances.set(instance.instance, { ...instance, history: extended(history, instance, this.now) });
    }
    for (const [id, instance] of this.#instances) {
      if (!here.has(id) && !instance.gone) instance.gone = this.now;
    }
    return fresh;
  }

  /** What the controller remembers of an instance, before what this page has seen itself. */
  takeHistory(id, history) {
    const instance = this.#instances.get(id);
    if (!instance) return;
    const last = history.at(-1)?.time ?? 0;
    const own = instance.history.filter((sample) => sample.time >= last + SAMPLE_SECONDS);
    instance.history = [...history, ...own].slice(-MOST_SAMPLES);
  }

  /** Forget those that have been gone for a while. */
  forget() {
    for (const [id, instance] of this.#instances) {
      if (instance.gone && this.now - instance.gone > GONE_SECONDS) this.#instances.delete(id);
    }
  }

  /** What is known of events may be of a former run of the controller: the next list is all there is. */
  startAnew() {
    this.#events.clear();
    this.hasEvents = false;
  }

  takeEvents(list) {
    this.hasEvents = true;
    list.forEach((event) => this.takeEvent(event));
  }

  /** An event as it is now; what arrives late does not undo what is known. */
  takeEvent(event) {
    const known = this.#events.get(event.event_id);
    if (known && !isAhead(event, known)) return;
    this.#events.set(event.event_id, event);
    if (this.#events.size > 2 * MOST_EVENTS) this.#events = new Map(this.events.map((kept) => [kept.event_id, kept]));
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

/** The samples with one of now, where the last is old enough. */
function extended(history, instance, now) {
  if (history.length && now - history.at(-1).time < SAMPLE_SECONDS) return history;
  const tiers = instance.tiers.map(({ used, found }) => ({ used, found }));
  return [...history, { time: now, looked_up: instance.looked_up, tiers }].slice(-MOST_SAMPLES);
}
