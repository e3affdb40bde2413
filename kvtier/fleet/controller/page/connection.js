// State of the connection to the controller, and the dialog for its token.

import { byId, setText } from "./dom.js";
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
    // A retry keeps showing the lost state until it succeeds.
    const trying = state === "connecting" && this.#since !== null;
    this.state = state;
    byId("connection").dataset.state = trying ? "lost" : state;
    setText(byId("connection").firstElementChild, trying ? STATES.lost : STATES[state]);
    this.#next = state === "lost" ? detail.next : null;
    if (state === "lost") this.#lost(detail.reason);
    else if (state === "unauthorised") this.#show("The controller requires a token.", "Enter the token");
    else if (state === "live") {
      this.#since = null;
      byId("banner").hidden = true;
    }
    this.draw();
  }

  #lost(reason) {
    this.#since ??= clock(Date.now() / 1000);
    this.#show(`${reason.message} The data shown is from ${this.#since} or earlier.`, "Retry now");
  }

  #show(text, button) {
    setText(byId("banner-text"), text);
    setText(byId("banner-button"), button);
    byId("banner").hidden = false;
  }

  /** Update the countdown to the next retry. Called every second. */
  draw() {
    const left = this.#next === null ? 0 : Math.ceil(this.#next - Date.now() / 1000);
    setText(byId("banner-next"), left > 0 ? `Retrying in ${left} s.` : "");
  }
}

/** The dialog that asks for the token. `onToken` checks it and returns an error message or "". */
export class TokenDialog {
  #dialog = byId("token-dialog");

  constructor(onToken) {
    byId("token-later").addEventListener("click", () => this.#dialog.close());
    byId("token-form").addEventListener("submit", async (event) => {
      event.preventDefault();
      setText(byId("token-outcome"), "");
      const error = await onToken(byId("token").value);
      if (!error) {
        byId("token").value = "";
        this.#dialog.close();
        return;
      }
      byId("token").setAttribute("aria-invalid", "true");
      byId("token").select();
      setText(byId("token-outcome"), error);
    });
  }

  open() {
    if (this.#dialog.open) return;
    byId("token").removeAttribute("aria-invalid");
    setText(byId("token-outcome"), "");
    this.#dialog.showModal();
    byId("token").focus();
  }
}
