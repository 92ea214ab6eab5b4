// A plot as a file: a table of its values, or the picture that is shown. Nothing leaves the browser.
import { h } from "./dom.js";

const STYLES = ["stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "fill", "fill-opacity", "opacity", "font-size", "font-family", "font-weight", "text-anchor"];
const [MARGIN, LINE] = [12, 18];

export function saver(title, series, box) {
  const name = title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "plot";
  const button = (ending, make) => h("button", { type: "button", onclick: async (event) => {
    event.target.closest("details").open = false;
    save(`${name}.${ending}`, await make());
  } }, ending.toUpperCase());
  return h("details", { class: "save" }, h("summary", { title: "Save the plot", "aria-label": `Save ${title}` }, "⤓"),
    h("div", {}, button("svg", () => asSvg(title, series, box)), button("png", () => asPng(title, series, box)), button("csv", () => asCsv(series))));
}

function save(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// A row for each step; a curve with a spread has three columns.
function asCsv(series) {
  const columns = series.flatMap((each) => {
    const wide = each.points.some((point) => point.length > 3);
    return [["", 1], ...(wide ? [[" low", 2], [" high", 3]] : [])].map(([what, at]) => [`${each.name}${what}`, new Map(each.points.map((point) => [point[0], point[at]]))]);
  });
  const axes = series.find((each) => each.axes)?.axes;
  const extra = axes && series.every((each) => each.axes === axes) ? [["seconds", 1], ["tokens", 2]].map(([what, at]) => [what, new Map([...axes].map(([step, row]) => [step, row[at]]))]) : [];
  const steps = [...new Set(series.flatMap((each) => each.points.map((point) => point[0])))].sort((a, b) => a - b);
  const all = [...extra, ...columns];
  const lines = [["step", ...all.map(([what]) => what)], ...steps.map((step) => [step, ...all.map(([, values]) => values.get(step) ?? "")])];
  return new Blob([lines.map((line) => line.map(cell).join(",")).join("\n"), "\n"], { type: "text/csv" });
}

// Names are an environment's: a spreadsheet must not take one for a formula.
function cell(value) {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// The drawing with its title and legend, each element with the style that it has on the page.
function picture(title, series, box) {
  const [width, plot] = [Number(box.getAttribute("width")), Number(box.getAttribute("height"))];
  const legend = series.length > 1 ? Math.ceil(series.length / 3) : 0;
  const above = MARGIN + LINE * (1 + legend) + 6;
  const copy = box.cloneNode(true);
  copy.querySelectorAll(".cursor, .brush").forEach((each) => each.remove());
  const own = [...box.children].filter((each) => !each.matches(".cursor, .brush"));
  [...copy.children].forEach((each, at) => dress(each, own[at]));
  const ink = getComputedStyle(document.body).color;
  const add = (tag, props, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(props)) node.setAttribute(key, String(value));
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const moved = add("g", { transform: `translate(0 ${above})` });
  moved.append(...copy.children);
  const font = { "font-family": "system-ui, sans-serif", fill: ink };
  const head = [add("rect", { x: 0, y: 0, width, height: above + plot, fill: getComputedStyle(box.closest("figure")).backgroundColor }),
    add("text", { x: MARGIN, y: MARGIN + 12, "font-size": "14px", "font-weight": "600", ...font }, title)];
  if (legend) series.forEach((each, at) => {
    const [x, y] = [MARGIN + (at % 3) * ((width - MARGIN) / 3), MARGIN + 12 + LINE * (1 + Math.floor(at / 3))];
    const colour = getComputedStyle(document.documentElement).getPropertyValue(`--c${each.colour % 8}`).trim();
    head.push(add("rect", { x, y: y - 9, width: 9, height: 9, fill: colour }), add("text", { x: x + 14, y, "font-size": "12px", ...font }, each.name));
  });
  const whole = add("svg", { xmlns: "http://www.w3.org/2000/svg", width, height: above + plot });
  whole.append(...head, moved);
  return whole;
}

function dress(copy, shown) {
  const style = getComputedStyle(shown);
  for (const name of STYLES) copy.setAttribute(name, style.getPropertyValue(name));
  copy.removeAttribute("class");
}

function asSvg(title, series, box) {
  return new Blob([new XMLSerializer().serializeToString(picture(title, series, box))], { type: "image/svg+xml" });
}

// Drawn by hand: the content security policy lets no image in that is not of this server, our own SVG neither.
function asPng(title, series, box) {
  const drawing = picture(title, series, box);
  const [width, height] = ["width", "height"].map((name) => Number(drawing.getAttribute(name)));
  const canvas = h("canvas", { width: 2 * width, height: 2 * height });
  const pen = canvas.getContext("2d");
  pen.scale(2, 2);
  for (const node of drawing.children) {
    if (node.tagName !== "g") paint(pen, node);
    else {
      pen.translate(0, Number(node.getAttribute("transform").match(/ (\d+)/)[1]));
      [...node.children].forEach((each) => paint(pen, each));
    }
  }
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

function paint(pen, node) {
  const get = (name) => node.getAttribute(name);
  const size = (name) => Number(get(name));
  pen.globalAlpha = Number(get("opacity") ?? 1) * Number(get("stroke-opacity") ?? 1);
  pen.setLineDash((get("stroke-dasharray") || "none") === "none" ? [] : get("stroke-dasharray").split(",").map(parseFloat));
  [pen.fillStyle, pen.strokeStyle, pen.lineWidth] = [get("fill") || "none", get("stroke") || "none", parseFloat(get("stroke-width")) || 1];
  if (node.tagName === "text") {
    pen.font = `${get("font-weight") || 400} ${get("font-size") || "11px"} ${get("font-family") || "sans-serif"}`;
    pen.textAlign = { middle: "center", end: "right" }[get("text-anchor")] || "left";
    pen.fillText(node.textContent, size("x"), size("y"));
    return;
  }
  pen.beginPath();
  if (node.tagName === "rect") pen.rect(size("x"), size("y"), size("width"), size("height"));
  else if (node.tagName === "circle") pen.arc(size("cx"), size("cy"), size("r"), 0, 2 * Math.PI);
  else if (node.tagName === "line") {
    pen.moveTo(size("x1"), size("y1"));
    pen.lineTo(size("x2"), size("y2"));
  } else (get("points") || "").split(" ").filter(Boolean).forEach((each, at) => pen[at ? "lineTo" : "moveTo"](...each.split(",").map(Number)));
  if (get("fill") !== "none" && node.tagName !== "line" && node.tagName !== "polyline") pen.fill();
  if (get("stroke") && get("stroke") !== "none") pen.stroke();
}
