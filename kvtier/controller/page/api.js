// Calls of the controller. Every failure is an ApiError whose message can be shown as it is.

const KEPT = "kvtier-controller-token";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export class Api {
  /** `onUnauthorised` is called whenever the controller does not accept the token that there is, or is not. */
  constructor(onUnauthorised) {
    this.onUnauthorised = onUnauthorised;
  }

  get token() {
    return sessionStorage.getItem(KEPT);
  }

  set token(token) {
    if (token) sessionStorage.setItem(KEPT, token);
    else sessionStorage.removeItem(KEPT);
  }

  get = (path) => this.#json(path, {});

  post = (path, body) =>
    this.#json(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });

  /** The answer, once it is known to be a good one; its body is for the caller to read. */
  async open(path, options) {
    const headers = { ...options.headers };
    if (this.token) headers.Authorization = `Bearer ${this.token}`;
    let answer;
    try {
      answer = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error instanceof ApiError) throw error; // What it was aborted with.
      throw new ApiError("The controller cannot be reached.");
    }
    if (answer.ok) return answer;
    if (answer.status === 401) this.onUnauthorised();
    throw new ApiError(await reason(answer), answer.status);
  }

  async #json(path, options) {
    const answer = await this.open(path, options);
    try {
      return await answer.json();
    } catch {
      throw new ApiError("The controller broke off in the middle of its answer.");
    }
  }
}

async function reason(answer) {
  if (answer.status === 401) return "The controller asks for its token.";
  try {
    const { detail } = await answer.json();
    if (typeof detail === "string" && detail) return `The controller says: ${stopped(detail)}`;
  } catch {
    // Not from the controller, but from a proxy before it.
  }
  return `The controller answered ${answer.status}${answer.statusText && ` ${answer.statusText}`}.`;
}

/** The controller's words, which are no sentence of their own, as the end of one. Names in them stay as they are. */
export const stopped = (words) => (/[.!?]$/.test(words) ? words : `${words}.`);
