// Makes elements. Text of a model only ever becomes a text node: nothing here parses HTML.
export function h(tag, props, ...children) {
  const node = document.createElement(tag);
  set(node, props || {});
  append(node, children);
  return node;
}

export function svg(tag, props, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  append(node, children);
  return node;
}

function set(node, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "value") node.value = value;
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
}

export function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren();
  return append(node, children);
}

// Control characters are shown, so that a completion cannot hide what it holds; directions of text cannot leave it.
export function visible(text) {
  // eslint-disable-next-line no-control-regex
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (char) => {
    const code = char.charCodeAt(0);
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : `⟨U+${code.toString(16).padStart(4, "0").toUpperCase()}⟩`;
  });
}

const FOLD_AT = 4000;

// A text of a model: long ones show their beginning until somebody asks for the rest.
export function text(value, props) {
  const whole = visible(String(value));
  const box = h("div", { class: "text", dir: "auto", ...(props || {}) });
  if (whole.length <= FOLD_AT) return append(box, [whole]);
  let shown = FOLD_AT;
  const more = h("button", { type: "button", class: "more" });
  const body = document.createTextNode("");
  const draw = () => {
    body.data = whole.slice(0, shown);
    more.textContent = `show more (${number(whole.length - shown)} characters)`;
    more.hidden = shown >= whole.length;
  };
  more.addEventListener("click", () => {
    shown += 100000;
    draw();
  });
  draw();
  return append(box, [body, more]);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return compact(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return value.toFixed(size >= 100 ? 1 : digits);
}

export function compact(value) {
  if (value === null || value === undefined) return "–";
  const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  for (const [size, unit] of units) {
    if (Math.abs(value) >= size) return `${(value / size).toFixed(1)}${unit}`;
  }
  return Number.isInteger(value) ? String(value) : value.toFixed(1);
}

// Headings of a table: those of numbers end in #, and stand over the ends of them.
export function heads(...names) {
  return names.map((name) => (name.endsWith("#") ? { head: name.slice(0, -1), class: "num" } : { head: name }));
}

export function bytes(value) {
  let size = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024 || unit === "GiB") return `${unit === "B" ? size : size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
  return "";
}

export function percent(value, digits = 0) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${(1000 * value).toFixed(0)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function moment(value) {
  if (!value) return "–";
  const date = new Date(1000 * value);
  const same = date.toDateString() === new Date().toDateString();
  const clock = date.toLocaleTimeString([], { hour12: false });
  return same ? clock : `${date.toISOString().slice(0, 10)} ${clock}`;
}

export function state(name) {
  return h("span", { class: `state state-${name.toLowerCase()}` }, name.toLowerCase());
}

export function table(columns, rows, props) {
  const head = h("tr", {}, columns.map((column) => h("th", { scope: "col", class: column.class, "aria-sort": column.sorted }, column.onsort ? h("button", { type: "button", class: "sort", onclick: column.onsort }, column.head) : column.head)));
  return h("div", { class: "scroll" }, h("table", props || {}, h("thead", {}, head), h("tbody", {}, rows)));
}

export function panel(title, ...children) {
  return h("section", { class: "panel" }, title ? h("h2", {}, title) : null, children);
}

export function link(href, ...children) {
  return h("a", { href }, children);
}
