// Entry point of the page: data from the controller goes into the store, and the views are redrawn at most once
// per frame.

import { Api } from "./api.js";
import { Connection, TokenDialog } from "./connection.js";
import { byId, setText } from "./dom.js";
import { Events } from "./events.js";
import { Instances } from "./instances.js";
import { Lists } from "./lists.js";
import { Lookup } from "./lookup.js";
import { Breakdown, Overview } from "./overview.js";
import { Problems } from "./problems.js";
import { MAX_EVENTS, Store } from "./store.js";
import { Stream } from "./stream.js";
import { Requests } from "./why.js";

const store = new Store();
const api = new Api(() => dialog.open());
const stream = new Stream(api, { state: onState, message: onMessage });
const connection = new Connection(
  () => stream.connect(),
  () => dialog.open(),
);
const dialog = new TokenDialog(tryToken);
const overview = new Overview(store, api, () => {
  breakdown.load();
  redraw();
});
const breakdown = new Breakdown(overview, api);
const lists = new Lists(api);
const instances = new Instances(store, api, overview);
const problems = new Problems(store, api, (id) => instances.show(id));
/** Load something besides the stream, so they wait until that is connected. */
const loading = [overview, breakdown, lists, problems, new Requests(api)];
const views = [instances, new Lookup(store, api), new Events(store)];

let scheduled = false;
let live = false;

function redraw() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    store.dropDisconnected();
    views.forEach((view) => view.draw());
    if (live) loading.forEach((view) => view.draw());
  });
}

function onState(state, detail) {
  connection.set(state, detail);
  live = state === "live";
  if (!live) return;
  store.ahead = detail;
  store.clearEvents();
  // Load after the stream has started, so that no change in between is missed.
  load("events", ({ events }) => store.takeEvents(events), `?limit=${MAX_EVENTS}`);
  load("about", ({ version, grafana }) => {
    setText(byId("version"), version);
    byId("grafana").hidden = !grafana;
    if (grafana) byId("grafana").href = grafana;
  });
  loading.forEach((view) => view.load());
}

function onMessage(name, value) {
  if (name === "instances") store.takeInstances(value);
  else if (name === "event") store.takeEvent(value);
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
