// Calls to the controller. Every failure is an ApiError, whose message can be shown to the user.

const TOKEN_KEY = "kvtier-controller-token";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export class Api {
  /** `onUnauthorised` is called when the controller rejects the token, or requires one and none is set. */
  constructor(onUnauthorised) {
    this.onUnauthorised = onUnauthorised;
  }

  get token() {
    return sessionStorage.getItem(TOKEN_KEY);
  }

  set token(token) {
    if (token) sessionStorage.setItem(TOKEN_KEY, token);
    else sessionStorage.removeItem(TOKEN_KEY);
  }

  get = (path) => this.#json(path, {});

  post = (path, body) =>
    this.#json(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });

  /** Return the response if it is successful. The caller reads the body. */
  async open(path, options) {
    const headers = { ...options.headers };
    if (this.token) headers.Authorization = `Bearer ${this.token}`;
    let answer;
    try {
      answer = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error instanceof ApiError) throw error; // The reason of an abort.
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
      throw new ApiError("The controller's response was cut off.");
    }
  }
}

async function reason(answer) {
  if (answer.status === 401) return "The controller requires a token.";
  try {
    const { detail } = await answer.json();
    if (typeof detail === "string" && detail) return `Controller error: ${sentence(detail)}`;
  } catch {
    // Not from the controller, but from a reverse proxy.
  }
  return `The controller answered ${answer.status}${answer.statusText && ` ${answer.statusText}`}.`;
}

/** Add a period to a message of the controller, unless it has one. The case is kept, as it may begin with a name. */
export const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);
