// Advantages by colour, which says what training does with a sample: two hues that everybody can tell apart, and a scale.
import { h, number } from "./dom.js";

const DEEPEST = 70; // percent of the hue at the largest advantage

export function shade(value, largest) {
  if (!value || !largest) return "";
  const depth = DEEPEST * Math.min(1, Math.abs(value) / largest);
  return `color-mix(in srgb, var(${value > 0 ? "--up" : "--down"}) ${depth.toFixed(0)}%, transparent)`;
}

export function advantage(value, largest) {
  return h("td", { class: "num", style: { backgroundColor: shade(value, largest) } }, number(value));
}

// What the colours mean, from the lowest to the highest; nothing where there is no advantage.
export function scale(largest) {
  if (!largest) return null;
  const parts = [-1, -0.5, 0, 0.5, 1].map((part) => h("i", { style: { backgroundColor: shade(part * largest, largest) } }));
  return h("span", { class: "scale", role: "img", "aria-label": `Colour of advantages: from ${number(-largest)}, made less likely, over 0 to ${number(largest)}, made more likely` },
    `advantage ${number(-largest)} `, parts, ` +${number(largest)}`);
}
