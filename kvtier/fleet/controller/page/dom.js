// Helpers to create and update elements. External values only become text: markup is never parsed, which the
// page's Content-Security-Policy also forbids.

const SVG = "http://www.w3.org/2000/svg";

/** Return an element of index.html by its id. */
export const byId = (id) => document.getElementById(id);

/** Create an element. Children that are strings become text. */
export function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** Create an SVG element. */
export function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Create a row of a table: its head, and the other cells. The roles stay where a style sheet makes blocks of rows. */
export function row(head, cells, attributes = {}) {
  return make("tr", { role: "row", ...attributes }, make("th", { scope: "row", role: "rowheader" }, head), ...cells);
}

/** Create a cell, with the name of its column for narrow screens. */
export const cell = (label, attributes, ...children) => make("td", { role: "cell", "data-label": label, ...attributes }, ...children);

/** Set an element's text if it has changed. An unchanged text is neither redrawn nor announced again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Replace the children of a parent, touching only those whose position has changed. */
export function arrange(parent, children) {
  children.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}

/** Set the options of a select, and keep its value if that is still an option. */
export function setOptions(select, options) {
  const key = JSON.stringify(options);
  if (select.dataset.options === key) return;
  select.dataset.options = key;
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

/** A meter or progress bar. `label` describes it to screen readers. */
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

  /** Set the fill, a fraction from 0 to 1, and its text for screen readers. */
  set(part, text) {
    const percent = Math.round(1000 * Math.min(1, Math.max(0, part || 0))) / 10;
    const key = `${percent} ${text}`;
    if (key === this.#last) return;
    this.#last = key;
    this.node.setAttribute("aria-valuenow", percent);
    this.node.setAttribute("aria-valuetext", text);
    // A transform needs no new layout, unlike a change of width.
    this.#filled.style.transform = `translateX(${percent - 100}%)`;
  }
}
