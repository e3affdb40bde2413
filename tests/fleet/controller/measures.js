// Measurements in the page, by the Web Content Accessibility Guidelines (WCAG 2).

function channels(colour) {
  const [red, green, blue, alpha = 1] = colour.match(/[\d.]+/g).map(Number);
  return { colour: [red, green, blue], alpha };
}

const over = (front, alpha, back) => front.map((value, index) => value * alpha + back[index] * (1 - alpha));

function luminance(colour) {
  const [red, green, blue] = colour.map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function background(element) {
  if (!element) return [255, 255, 255];
  const { colour, alpha } = channels(getComputedStyle(element).backgroundColor);
  return alpha === 1 ? colour : over(colour, alpha, background(element.parentElement));
}

function opacity(element) {
  return element ? Number(getComputedStyle(element).opacity) * opacity(element.parentElement) : 1;
}

function ratio(element, style) {
  const back = background(element);
  const { colour, alpha } = channels(style.color);
  const [first, second] = [over(colour, alpha * opacity(element), back), back].map(luminance);
  return (Math.max(first, second) + 0.05) / (Math.min(first, second) + 0.05);
}

const isVisible = (element) => element.checkVisibility() && element.getBoundingClientRect().width > 1;

/** Count the texts, and list those whose contrast with their background is below 4.5. */
function contrast() {
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (node.data.trim() && isVisible(element)) texts.push([node.data.trim(), ratio(element, getComputedStyle(element))]);
  }
  for (const element of document.querySelectorAll("input:not([type=radio]), select, textarea")) {
    if (!isVisible(element)) continue;
    texts.push([`#${element.id}`, ratio(element, getComputedStyle(element))]);
    texts.push([`#${element.id} placeholder`, ratio(element, getComputedStyle(element, "::placeholder"))]);
  }
  return { texts: texts.length, poor: texts.filter(([, value]) => value < 4.5) };
}

/** List the elements that extend beyond the window, except scrollable ones. */
function overflowing() {
  const width = document.documentElement.clientWidth;
  const wide = [...document.querySelectorAll("body *")].filter(
    (element) => isVisible(element) && !element.closest("pre, .scroll") && element.getBoundingClientRect().right > width + 0.5,
  );
  return [document.documentElement.scrollWidth - width, ...wide.map((element) => element.outerHTML.slice(0, 80))];
}

/** List the fields and buttons without a name, and duplicate ids. */
function nameless() {
  const fields = [...document.querySelectorAll("input, select, textarea")].filter((field) => !field.labels.length);
  const buttons = [...document.querySelectorAll("button")].filter((button) => isVisible(button) && !button.textContent.trim());
  const ids = [...document.querySelectorAll("[id]")].map(({ id }) => id);
  return [...fields, ...buttons].map(({ outerHTML }) => outerHTML).concat(ids.filter((id, index) => ids.indexOf(id) !== index));
}
