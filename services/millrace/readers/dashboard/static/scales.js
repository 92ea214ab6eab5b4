// Numbers to pixels and back: linear and logarithmic, with at least two labels on every axis.
import { compact } from "./dom.js";

const FEWEST = 2;

// Round values between two ends, at most `most` if that leaves enough of them.
export function ticks(low, high, most) {
  if (!(high > low)) return [low];
  let found = [];
  for (let parts = most; found.length < FEWEST && parts < 8 * most; parts *= 2) found = rounded(low, high, (high - low) / parts);
  return found;
}

function rounded(low, high, rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * (1 - 1e-9));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

function logTicks(low, high) {
  const decades = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) decades.push(power);
  const every = Math.ceil(decades.length / 6);
  const inside = (value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9);
  for (const factors of [[1], [1, 3], [1, 2, 5]]) {
    const found = decades.filter((power) => power % every === 0).flatMap((power) => factors.map((factor) => factor * 10 ** power)).filter(inside);
    if (found.length >= FEWEST) return found;
  }
  return ticks(low, high, 4);
}

// As many digits as tell two neighbours apart.
export function tickText(value, apart) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e4) return compact(value);
  if (apart < 1e-4) return value.toExponential(1);
  return value.toFixed(Math.max(0, Math.min(5, Math.ceil(-Math.log10(apart) - 1e-9))));
}

// A scale from values in [low, high] to pixels in [from, to], with the labels of its axis.
export function linear(low, high, from, to, most) {
  const marks = ticks(low, high, most);
  const apart = marks.length > 1 ? marks[1] - marks[0] : high - low;
  const at = (value) => from + ((value - low) / (high - low)) * (to - from);
  const back = (pixel) => low + ((pixel - from) / (to - from)) * (high - low);
  return { at, back, marks: marks.map((value) => [value, tickText(value, apart)]) };
}

export function logarithmic(low, high, from, to) {
  const inner = linear(Math.log10(low), Math.log10(high), from, to, 4);
  const text = (value) => (value >= 1e4 || value < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(3))));
  return { at: (value) => inner.at(Math.log10(value)), back: (pixel) => 10 ** inner.back(pixel), marks: logTicks(low, high).map((value) => [value, text(value)]) };
}
