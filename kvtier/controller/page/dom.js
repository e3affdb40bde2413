// Elements from names, attributes and children. What comes from outside becomes text and nothing else: no
// markup is ever parsed, which the page's Content-Security-Policy also forbids.

const SVG = "http://www.w3.org/2000/svg";

/** The element of this id, which index.html has. */
export const byId = (id) => document.getElementById(id);

/** A new element; children that are strings become text. */
export function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same within a drawing. */
export function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Set an element's text where it is another one: what has not changed is not drawn, nor read out, again. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Bring the children of a parent into this order, touching those alone that are not in their place. */
export function arrange(parent, children) {
  children.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}

/** Make these the options of a select and keep what was chosen where it is still one of them. */
export function offer(select, options) {
  const wanted = JSON.stringify(options);
  if (select.dataset.options === wanted) return;
  select.dataset.options = wanted;
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

/** A bar that is filled so far. `label` says of what, for those who do not see it. */
export class Bar {
  #filled = make("span");
  #last = null;

  constructor(label, role = "meter") {
    this.node = make("div", { class: "meter", role, "aria-valuemin": 0, "aria-valuemax": 100 }, this.#filled);
    this.label(label);
  }

  label(text) {
    this.node.setAttribute("aria-label", text);
  }

  /** `part` is from 0 to 1. */
  set(part, words) {
    const percent = Math.round(1000 * Math.min(1, Math.max(0, part || 0))) / 10;
    const key = `${percent} ${words}`;
    if (key === this.#last) return;
    this.#last = key;
    this.node.setAttribute("aria-valuenow", percent);
    this.node.setAttribute("aria-valuetext", words);
    // Moved, not made wider: that needs no new layout.
    this.#filled.style.transform = `translateX(${percent - 100}%)`;
  }
}
