// Numbers, sizes and times as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;

const counts = new Intl.NumberFormat("en");

export const count = (number) => counts.format(number);

/** "1 token", "2,048 tokens". */
export const many = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;

/** Bytes in the largest binary unit that leaves at least one of it, with three digits. */
export function bytes(number) {
  let unit = 0;
  while (number >= 1024 && unit < UNITS.length - 1) {
    number /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || number >= 100 ? 0 : number >= 10 ? 1 : 2;
  return `${number.toFixed(digits)}\u00a0${UNITS[unit]}`;
}

/** "3.2 of 20 GiB", or each with its own unit where they differ. */
export function bytesOf(part, whole) {
  const [some, all] = [bytes(part), bytes(whole)];
  const [number, unit] = some.split("\u00a0");
  return all.endsWith(`\u00a0${unit}`) ? `${number} of ${all}` : `${some} of ${all}`;
}

/** A part of one as a percentage. Neither "0 %" nor "100 %" where it is not quite so. */
export function percent(part) {
  if (part > 0 && part < 0.01) return "<\u00a01\u00a0%";
  if (part < 1 && part > 0.99) return ">\u00a099\u00a0%";
  return `${Math.round(100 * part)}\u00a0%`;
}

/** Seconds that have gone by, coarsely: for what is told anew all the time. */
export function age(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < MINUTE) return `${whole}\u00a0s`;
  if (whole < HOUR) return `${Math.floor(whole / MINUTE)}\u00a0min`;
  if (whole < DAY) return `${Math.floor(whole / HOUR)}\u00a0h`;
  return many(Math.floor(whole / DAY), "day");
}

/** How long something took, in seconds. */
export function took(seconds) {
  if (seconds < 1) return `${Math.max(0, Math.round(1000 * seconds))} ms`;
  if (seconds < MINUTE) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / MINUTE)} min ${Math.round(seconds % MINUTE)} s`;
}

/** Seconds since 1970 as the time of day here. */
export const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");

/** An instance and one of its tiers, or all of them. */
export const place = ([instance, tier]) => (tier === null ? `${instance}\u00a0· all tiers` : `${instance}\u00a0·\u00a0${tier}`);
