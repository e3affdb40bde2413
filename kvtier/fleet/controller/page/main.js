// Entry point of the page: data from the controller goes into the store, and the views are redrawn at most once
// per frame.

import { Api } from "./api.js";
import { Connection, TokenDialog } from "./connection.js";
import { byId, setText } from "./dom.js";
import { Events } from "./events.js";
import { Instances } from "./instances.js";
import { Lookup } from "./lookup.js";
import { MAX_EVENTS, Store } from "./store.js";
import { Stream } from "./stream.js";

const store = new Store();
const api = new Api(() => dialog.open());
const stream = new Stream(api, { state: onState, message: onMessage });
const connection = new Connection(
  () => stream.connect(),
  () => dialog.open(),
);
const dialog = new TokenDialog(tryToken);
const views = [new Instances(store, api), new Lookup(store, api), new Events(store)];

let scheduled = false;
let reconnected = false;

function redraw() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    store.dropDisconnected();
    views.forEach((view) => view.draw());
  });
}

function onState(state, detail) {
  connection.set(state, detail);
  if (state !== "live") return;
  reconnected = true;
  store.ahead = detail;
  store.clearEvents();
  // Load after the stream has started, so that no change in between is missed.
  load("events", ({ events }) => store.takeEvents(events), `?limit=${MAX_EVENTS}`);
  load("healthz", ({ version }) => setText(byId("version"), version));
}

function onMessage(name, value) {
  if (name === "instances") {
    const fresh = store.takeInstances(value.instances);
    // The controller has samples of the time in which this page was not connected.
    (reconnected ? value.instances.map(({ instance }) => instance) : fresh).forEach(loadHistory);
    reconnected = false;
  } else if (name === "event") store.takeEvent(value);
  redraw();
}

/** Load a resource into the store and redraw. On an error the stream fails as well, and its retry loads again. */
function load(path, take, query = "") {
  return api
    .get(path + query)
    .then((answer) => {
      take(answer);
      redraw();
    })
    .catch((error) => console.warn(`kvtier: ${path}:`, error.message));
}

let historyLoads = Promise.resolve();

/** Load the last hour of an instance. Loads are sequential, as there may be many instances. */
function loadHistory(id) {
  const take = ({ history }) => store.takeHistory(id, history);
  historyLoads = historyLoads.then(() => load(`instances/${encodeURIComponent(id)}`, take));
}

/** Check a token with the controller. Return an error message or "". */
async function tryToken(token) {
  api.token = token;
  try {
    await api.get("instances");
  } catch (error) {
    if (error.status === 401) {
      api.token = null;
      return "The controller does not accept this token.";
    }
    return error.message;
  }
  stream.connect();
  return "";
}

byId("confirm-yes").addEventListener("click", () => byId("confirm-dialog").close("yes"));
byId("confirm-no").addEventListener("click", () => byId("confirm-dialog").close("no"));

setInterval(() => {
  connection.draw();
  redraw();
}, 1000);
stream.connect();
