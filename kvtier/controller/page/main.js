// Puts the page together: what comes from the controller goes into the store, and what has changed is drawn
// once before the next frame, however much of it there was.

import { Api } from "./api.js";
import { Connection, TokenDialog } from "./connection.js";
import { byId, say } from "./dom.js";
import { Events } from "./events.js";
import { Instances } from "./instances.js";
import { LookUp } from "./lookup.js";
import { MOST_EVENTS, Store } from "./store.js";
import { Stream } from "./stream.js";

const store = new Store();
const api = new Api(() => dialog.open());
const stream = new Stream(api, { state: onState, message: onMessage });
const connection = new Connection(
  () => stream.connect(),
  () => dialog.open(),
);
const dialog = new TokenDialog(tryToken);
const views = [new Instances(store, api), new LookUp(store, api), new Events(store)];

let scheduled = false;

function redraw() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    store.forget();
    views.forEach((view) => view.draw());
  });
}

function onState(state, detail) {
  connection.set(state, detail);
  if (state !== "live") return;
  store.ahead = detail;
  store.startAnew();
  // After the stream has begun, so that nothing falls between the two.
  load("events", ({ events }) => store.takeEvents(events), `?limit=${MOST_EVENTS}`);
  load("healthz", ({ version }) => say(byId("version"), version));
}

function onMessage(name, value) {
  if (name === "instances") store.takeInstances(value.instances).forEach(remember);
  else if (name === "event") store.takeEvent(value);
  redraw();
}

/** Ask for something, take it in and draw. Where that fails the stream fails, too, and all is asked anew. */
function load(path, take, query = "") {
  return api
    .get(path + query)
    .then((answer) => {
      take(answer);
      redraw();
    })
    .catch((error) => console.warn(`kvtier: ${path}:`, error.message));
}

let remembering = Promise.resolve();

/** Ask for the last hour of an instance; one after the other, since there may be many. */
function remember(id) {
  const take = ({ history }) => store.takeHistory(id, history);
  remembering = remembering.then(() => load(`instances/${encodeURIComponent(id)}`, take));
}

/** Whether the controller accepts a token: why not, or "". */
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
