// Formatting of numbers, sizes and times.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;

const counts = new Intl.NumberFormat("en");
const compacts = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (number) => counts.format(number);

/** "950", "12.3K", "4.5M". */
export const compact = (number) => compacts.format(number);

/** "1 token", "2,048 tokens". */
export const pluralize = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;

/** Format bytes in the largest binary unit with a value of at least 1, with three digits. */
export function bytes(number) {
  let unit = 0;
  while (number >= 1024 && unit < UNITS.length - 1) {
    number /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || number >= 100 ? 0 : number >= 10 ? 1 : 2;
  return `${number.toFixed(digits)}\u00a0${UNITS[unit]}`;
}

export const throughput = (number) => `${bytes(number)}/s`;

/** The same as numbers on an axis, without needless zeros. */
export const bytesTick = (number) => bytes(number).replace(/\.0+(?=\D)/, "").replace(/(\.\d)0(?=\D)/, "$1");

/** Format as "3.2 of 20 GiB", or with both units if they differ. */
export function bytesOf(part, whole) {
  const [some, all] = [bytes(part), bytes(whole)];
  const [number, unit] = some.split("\u00a0");
  return all.endsWith(`\u00a0${unit}`) ? `${number} of ${all}` : `${some} of ${all}`;
}

/** Format a fraction as a percentage. "0 %" and "100 %" are exact. */
export function percent(part) {
  if (part > 0 && part < 0.01) return "<\u00a01\u00a0%";
  if (part < 1 && part > 0.99) return ">\u00a099\u00a0%";
  return `${Math.round(100 * part)}\u00a0%`;
}

/** Format an age in seconds coarsely, as it is redrawn every second. */
export function age(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < MINUTE) return `${whole}\u00a0s`;
  if (whole < HOUR) return `${Math.floor(whole / MINUTE)}\u00a0min`;
  if (whole < DAY) return `${Math.floor(whole / HOUR)}\u00a0h`;
  return pluralize(Math.floor(whole / DAY), "day");
}

/** Format a duration in seconds. */
export function elapsed(seconds) {
  if (seconds < 1) return `${Math.max(0, Math.round(1000 * seconds))} ms`;
  if (seconds < MINUTE) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / MINUTE)} min ${Math.round(seconds % MINUTE)} s`;
}

/** Format an amount of work in the largest unit below it: "2.2 h", "31 min". */
export function amount(seconds) {
  const [unit, name] = [[HOUR, "h"], [MINUTE, "min"]].find(([unit]) => seconds >= unit) ?? [1, "s"];
  const number = seconds / unit;
  return `${number >= 100 ? count(Math.round(number)) : Number(number.toPrecision(2))}\u00a0${name}`;
}

/** Format a Unix timestamp as local time of day. */
export const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");

const shortTime = (seconds) => clock(seconds).slice(0, 5);
const shortDay = (seconds) => new Date(1000 * seconds).toLocaleDateString("en-GB", { weekday: "short", day: "numeric" });

/** The horizontal axis of a span: how a time is shown as a tick, and in full. */
export const timeAxis = (span) => ({
  tick: (seconds, last) => (last ? "now" : span === "week" ? shortDay(seconds) : shortTime(seconds)),
  full: (seconds) => (span === "hour" ? clock(seconds) : `${shortDay(seconds)}, ${shortTime(seconds)}`),
});

/** Return a time, with the date unless it is today. */
export function moment(seconds) {
  const day = new Date(1000 * seconds).toLocaleDateString("en-CA");
  return day === new Date().toLocaleDateString("en-CA") ? clock(seconds) : `${day} ${clock(seconds)}`;
}

/** Format an instance and its tier; null means all tiers. */
export const place = ([instance, tier]) => (tier === null ? `${instance}\u00a0· all tiers` : `${instance}\u00a0·\u00a0${tier}`);
