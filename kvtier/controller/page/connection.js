// How the page stands with the controller, in words, and the token that the controller asks for.

import { byId, say } from "./dom.js";
import { clock } from "./format.js";

const STATES = {
  connecting: "Connecting",
  live: "Live",
  lost: "Disconnected",
  unauthorised: "No token",
};

/** The badge at the top and the banner below it. */
export class Connection {
  #next = null;
  #since = null;

  constructor(onRetry, onToken) {
    byId("banner-button").addEventListener("click", () => (this.state === "unauthorised" ? onToken() : onRetry()));
    this.set("connecting");
  }

  set(state, detail) {
    // While it tries again, what was lost stays lost.
    const trying = state === "connecting" && this.#since !== null;
    this.state = state;
    byId("connection").dataset.state = trying ? "lost" : state;
    say(byId("connection").firstElementChild, trying ? STATES.lost : STATES[state]);
    this.#next = state === "lost" ? detail.next : null;
    if (state === "lost") this.#lost(detail.reason);
    else if (state === "unauthorised") this.#show("The controller shows nothing without its token.", "Enter the token");
    else if (state === "live") {
      this.#since = null;
      byId("banner").hidden = true;
    }
    this.draw();
  }

  #lost(reason) {
    this.#since ??= clock(Date.now() / 1000);
    this.#show(`${reason.message} What is shown is of ${this.#since} or older.`, "Try now");
  }

  #show(text, button) {
    say(byId("banner-text"), text);
    say(byId("banner-button"), button);
    byId("banner").hidden = false;
  }

  /** When the next try is; called every second. */
  draw() {
    const left = this.#next === null ? 0 : Math.ceil(this.#next - Date.now() / 1000);
    say(byId("banner-next"), left > 0 ? `Next try in ${left} s.` : "");
  }
}

/** The dialog that asks for the token. `onToken` is given it, and returns why it is not the right one, or "". */
export class TokenDialog {
  #dialog = byId("token-dialog");

  constructor(onToken) {
    byId("token-later").addEventListener("click", () => this.#dialog.close());
    byId("token-form").addEventListener("submit", async (event) => {
      event.preventDefault();
      say(byId("token-outcome"), "");
      const wrong = await onToken(byId("token").value);
      if (!wrong) {
        byId("token").value = "";
        this.#dialog.close();
        return;
      }
      byId("token").setAttribute("aria-invalid", "true");
      byId("token").select();
      say(byId("token-outcome"), wrong);
    });
  }

  open() {
    if (this.#dialog.open) return;
    byId("token").removeAttribute("aria-invalid");
    say(byId("token-outcome"), "");
    this.#dialog.showModal();
    byId("token").focus();
  }
}
