// The frame of all pages: which one the address names, theme, keys, and the clock that keeps a live page fresh.
import { clearTroubles, mayOnlyRead, session, trouble } from "./api.js";
import { fill, h, link } from "./dom.js";
import { comparePage } from "./page_compare.js";
import { lineagePage } from "./page_lineage.js";
import { runPage } from "./page_run.js";
import { runsPage } from "./page_runs.js";
import { samplePage } from "./page_sample.js";
import { samplesPage } from "./page_samples.js";
import { timelinePage } from "./page_timeline.js";

const main = document.getElementById("main");
const EVERY_MS = 3000;
let current = null;

const ROUTES = [
  [/^\/(runs)?$/, runsPage, () => [["Runs", "/"]]],
  [/^\/compare$/, comparePage, () => [["Runs", "/"], ["Compare", null]]],
  [/^\/runs\/([^/]+)$/, runPage, crumbs("")],
  [/^\/runs\/([^/]+)\/samples$/, samplesPage, crumbs("Samples")],
  [/^\/runs\/([^/]+)\/samples\/([^/]+)$/, samplePage, crumbs("Samples")],
  [/^\/runs\/([^/]+)\/lineage$/, lineagePage, crumbs("Lineage")],
  [/^\/runs\/([^/]+)\/timeline$/, timelinePage, crumbs("Timeline")],
];

function crumbs(here) {
  return (run, part) => {
    const base = `/runs/${encodeURIComponent(run)}`;
    const found = [["Runs", "/"], [run, base]];
    if (here) found.push([here, part ? `${base}/samples` : null]);
    if (part) found.push([part, null]);
    return found;
  };
}

export function go(path) {
  history.pushState(null, "", path);
  show();
}

async function show() {
  current?.stop();
  clearTroubles();
  const found = ROUTES.map(([pattern, page, trail]) => [location.pathname.match(pattern), page, trail]).find(([match]) => match);
  const parts = (found ? found[0].slice(1) : []).filter((part) => part !== undefined).map(decodeURIComponent);
  const trail = found ? found[2](...parts) : [["Runs", "/"]];
  fill(document.getElementById("crumbs"), trail.map(([name, href]) => (href ? link(href, name) : h("span", {}, name))));
  document.title = [...trail.map(([name]) => name).reverse(), "Millrace"].join(" · ");
  if (!found) {
    fill(main, h("p", { class: "none" }, "There is no such page."));
    return;
  }
  const page = new Page();
  current = page;
  fill(main, h("p", { class: "loading" }, "Reading the log…"));
  await open(page, () => found[1](page, ...parts));
}

// Opens a page; again and again while the log is still being read for what it is about.
async function open(page, draw) {
  try {
    await draw();
  } catch (error) {
    if (page.isOver) return;
    if (error.reason !== "INDEX_GROWING") {
      page.failed(error);
      return;
    }
    fill(main, h("p", { class: "loading" }, `Reading the log: ${error.message}…`));
    page.timers.push(setTimeout(() => open(page, draw), 1000));
  }
}

// One page as long as it is shown. `every` looks again while the page is visible.
class Page {
  constructor() {
    this.isOver = false;
    this.aborter = new AbortController();
    this.timers = [];
    this.keys = {};
    this.main = main;
    this.go = go;
  }

  get signal() {
    return this.aborter.signal;
  }

  stop() {
    this.isOver = true;
    this.aborter.abort();
    this.timers.forEach(clearTimeout);
    document.getElementById("live").textContent = "";
  }

  failed(error) {
    if (error.name === "AbortError") return;
    const remedy = error.remedy ? h("p", {}, `Remedy: ${error.remedy}`) : null;
    fill(main, h("div", { class: "panel failed" }, h("h2", {}, "This cannot be shown"), h("p", {}, error.message), remedy));
  }

  // Calls `look` now, and again as long as it returns true.
  async every(look, ms = EVERY_MS) {
    const again = () => {
      const timer = setTimeout(async () => {
        if (this.isOver) return;
        if (document.hidden) {
          again();
          return;
        }
        try {
          if ((await look()) && !this.isOver) again();
          trouble("look", "");
        } catch (error) {
          if (error.name === "AbortError") return;
          trouble("look", error.message);
          again();
        }
      }, ms);
      this.timers.push(timer);
    };
    let goesOn = true;
    try {
      goesOn = await look();
    } catch (error) {
      if (error.status !== 0 && !(error.status >= 500)) throw error;
      trouble("look", error.message); // what passes is asked for again
    }
    document.getElementById("live").textContent = goesOn ? "live" : "";
    if (goesOn) again();
  }
}

const KEYS = [
  ["r", "all runs"], ["o", "the run"], ["s", "its samples"], ["l", "its lineage"], ["t", "its timeline"],
  ["/", "the first filter"], ["j / k", "the next or previous sample"], ["g", "its group side by side"], ["← / →", "read a chart that has the focus"],
  ["d", "dark or light"], ["?", "this list"],
];

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const run = location.pathname.match(/^\/runs\/([^/]+)/)?.[0];
  const help = document.getElementById("help");
  const where = { r: "/", o: run, s: run && `${run}/samples`, l: run && `${run}/lineage`, t: run && `${run}/timeline` }[event.key];
  if (current?.keys[event.key]) current.keys[event.key]();
  else if (where) go(where);
  else if (event.key === "d") theme();
  else if (event.key === "?") showHelp(help);
  else if (event.key === "/") main.querySelector("input, select")?.focus();
  else return;
  event.preventDefault();
}

function showHelp(help) {
  fill(help, h("h2", {}, "Keys"), h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])),
    h("form", { method: "dialog" }, h("button", {}, "Close")));
  help.showModal();
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("millrace-theme", next);
}

const kept = localStorage.getItem("millrace-theme");
if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
document.getElementById("theme").addEventListener("click", theme);
document.getElementById("keys").addEventListener("click", () => showHelp(document.getElementById("help")));
document.addEventListener("keydown", onKey);
document.addEventListener("click", (event) => {
  const anchor = event.target.closest("a");
  if (!anchor || event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0 || anchor.target) return;
  const href = anchor.getAttribute("href");
  if (!href || !href.startsWith("/") || href.startsWith("/api/")) return;
  event.preventDefault();
  go(href);
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});
addEventListener("popstate", show);
session().then(() => {
  document.getElementById("read-only").hidden = !mayOnlyRead();
  show();
}, (error) => {
  trouble("session", error.message);
  show();
});
