// Elements and numbers as text. Text from runs only ever becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Creates an element. Children are elements or texts. */
export function h(tag, properties, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** Creates an element of an SVG picture. */
export function s(tag, properties, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

export const byId = (id) => document.getElementById(id);

/** Returns a number in a form that is easy to read. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "not a number";
  if (!Number.isFinite(value)) return value > 0 ? "infinite" : "−infinite";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return scientific(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return size >= 1000 ? Math.round(value).toLocaleString("en-US") : value.toPrecision(4).replace(/\.?0+$/, "");
}

/** Returns a number with a power of ten, such as `1.5e-4`. */
export function scientific(value) {
  return value === 0 ? "0" : value.toExponential(2).replace(/\.?0+e/, "e");
}

/** Returns bytes with a unit. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit + 1 < units.length) [value, unit] = [value / 1024, unit + 1];
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** Returns milliseconds with a unit. */
export function milliseconds(value) {
  return value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value < 10 ? value.toFixed(2) : value.toFixed(0)} ms`;
}

/** Returns a duration in seconds such as `2h 05m`. */
export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  const two = (part) => String(part).padStart(2, "0");
  if (days) return `${days}d ${two(hours)}h`;
  if (hours) return `${hours}h ${two(minutes)}m`;
  return minutes ? `${minutes}m ${two(whole % 60)}s` : `${whole}s`;
}

/** Returns a time in seconds since 1970 in UTC. */
export function utc(seconds) {
  const date = new Date(seconds * 1000);
  return Number.isNaN(date.getTime()) ? "–" : date.toISOString().slice(0, 19).replace("T", " ");
}

/** Returns the number of a value of a record: numbers that are not finite are texts, and null is no value. */
export function value(recorded) {
  return recorded === null || recorded === undefined ? null : Number(recorded);
}
