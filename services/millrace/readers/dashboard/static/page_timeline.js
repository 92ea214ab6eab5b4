// Lanes of who did what when, and why a step takes as long as it does.
import { get, newest, of, trouble } from "./api.js";
import { fill, h, moment, panel, percent, seconds, svg } from "./dom.js";
import { tabs } from "./page_run.js";
import { know, numberGone, short, where } from "./workers.js";

const ROW = 26;
const LEFT = 190;
const KINDS = [["wait", "waits for its batch"], ["work", "forward and backward"], ["other", "rest of a step"], ["publish", "publishes a version"], ["update", "fetches a version"], ["pause", "stands still"], ["commit", "commits a batch"], ["play", "plays rollouts"]];

export async function timelinePage(page, run) {
  const asked = new URLSearchParams(location.search);
  let steps = Number(asked.get("steps")) || 20;
  const body = h("div", {});
  const choose = h("select", { "aria-label": "How many steps", onchange: (event) => {
    steps = Number(event.target.value);
    history.replaceState(null, "", `${location.pathname}?steps=${steps}`);
    look().catch((error) => trouble("look", error.message));
  } }, [5, 20, 50, 100, 500].map((count) => h("option", { value: count }, `last ${count} steps`)));
  choose.value = String(steps);
  fill(page.main, tabs(run, "Timeline"), h("div", { class: "tools" }, choose), body);
  let drawn = "";
  const ask = newest();
  const look = async () => {
    const answers = await ask(Promise.all([get(`${of(run)}/timeline`, { steps }, page.signal), get(of(run), {}, page.signal)]));
    if (!answers) return true;
    const [found, about] = answers;
    know(about.workers, about.names);
    trouble("store", found.stale || "");
    const key = JSON.stringify([found.last_step, steps, found.marks.length, found.index?.rollouts]);
    if (key !== drawn) draw(body, found);
    drawn = key;
    return !about.has_ended || found.index?.is_growing;
  };
  await page.every(look);
}

function draw(body, found) {
  const begins = (lane) => Math.min(...(lane.spans || []).map((span) => span[1]), Infinity);
  numberGone([...[...found.lanes].sort((a, b) => begins(a) - begins(b)).map((lane) => lane.name), ...found.marks.map((mark) => mark.text)]);
  const words = h("ul", { class: "words" }, found.words.map((each, at) => h("li", { class: at === 0 ? "first" : "" }, each)));
  const shares = h("div", { class: "shares", role: "img", "aria-label": found.shares.map((each) => `${each.text} ${percent(each.share)}`).join(", ") });
  for (const each of found.shares.filter((share) => share.share >= 0.005)) {
    const part = h("span", { class: `share cause-${each.cause}`, title: `${each.text}: ${percent(each.share)}, ${seconds(each.seconds)} of a step` }, each.share > 0.12 ? `${each.cause} ${percent(each.share)}` : "");
    part.style.flexGrow = String(each.share);
    shares.append(part);
  }
  fill(body, panel("Why a step takes its time", words, shares), found.lanes.length ? panel(`Steps ${found.first_step}–${found.last_step}`, legend(found), lanes(found)) : null, marks(found));
}

function legend(found) {
  const used = new Set(found.lanes.flatMap((lane) => (lane.counts ? ["play"] : lane.spans.map((span) => span[0]))));
  return h("p", { class: "legend" }, KINDS.filter(([kind]) => used.has(kind)).map(([kind, name]) => h("span", {}, h("i", { class: `swatch k-${kind}` }), name)), found.marks.some((mark) => mark.kind === "death") ? h("span", {}, h("i", { class: "swatch k-death" }), "death or recovery") : null);
}

function lanes(found) {
  const place = h("div", { class: "lanes scroll" });
  const readout = h("p", { class: "readout", role: "status" }, `from ${moment(found.begin)} to ${moment(found.end)}, ${seconds(found.end - found.begin)}`);
  let width = 0;
  const paint = () => {
    const inner = Math.max(300, width - LEFT - 12);
    const x = (time) => LEFT + ((time - found.begin) / (found.end - found.begin)) * inner;
    const height = found.lanes.length * ROW + 26;
    const box = svg("svg", { width: LEFT + inner + 12, height, role: "img", "aria-label": "lanes of the workers" });
    const show = (textOf) => () => {
      readout.textContent = textOf;
    };
    found.lanes.forEach((lane, at) => {
      const y = at * ROW + 4;
      box.append(svg("text", { class: "lane", x: 0, y: y + 13 }, shorten(short(lane.name)), svg("title", {}, where(lane.name) || lane.name)));
      box.append(svg("line", { class: "grid", x1: LEFT, x2: LEFT + inner, y1: y + ROW - 5, y2: y + ROW - 5 }));
      if (lane.counts) box.append(...area(lane, x, y, found, show));
      for (const [kind, start, end, words] of lane.spans) {
        const wide = Math.max(1.5, x(end) - x(start));
        box.append(svg("rect", { class: `k-${kind}`, x: x(start).toFixed(1), y, width: wide.toFixed(1), height: ROW - 9, onpointerenter: show(`${words}: ${seconds(end - start)}, ${moment(end)}`) }, svg("title", {}, `${words}: ${seconds(end - start)}`)));
      }
    });
    for (const mark of found.marks.filter((each) => each.kind !== "wait" && each.time >= found.begin && each.time <= found.end)) {
      box.append(svg("line", { class: `mark m-${mark.kind}`, x1: x(mark.time), x2: x(mark.time), y1: 0, y2: height - 22, onpointerenter: show(mark.text) }, svg("title", {}, mark.text)));
    }
    for (let part = 0; part <= 4; part += 1) {
      const time = found.begin + ((found.end - found.begin) * part) / 4;
      box.append(svg("text", { class: "tick", x: x(time), y: height - 6, "text-anchor": part === 4 ? "end" : part ? "middle" : "start" }, `+${seconds(time - found.begin)}`));
    }
    fill(place, box);
  };
  new ResizeObserver((entries) => {
    const now = Math.floor(entries[0].contentRect.width);
    if (now > 0 && now !== width) {
      width = now;
      paint();
    }
  }).observe(place);
  return [place, readout];
}

function area(lane, x, y, found, show) {
  const most = Math.max(1, ...lane.counts);
  const tall = ROW - 9;
  const time = (at) => found.begin + ((found.end - found.begin) * at) / (lane.counts.length - 1);
  const line = lane.counts.map((count, at) => `${x(time(at)).toFixed(1)},${(y + tall - (count / most) * tall).toFixed(1)}`);
  const words = `${short(lane.name)}: up to ${most} rollouts at once; ${percent(lane.model_share)} of their time in the engine, ${percent(1 - lane.model_share)} in the environment`;
  return [svg("polygon", { class: "k-play", points: [`${x(found.begin)},${y + tall}`, ...line, `${x(found.end)},${y + tall}`].join(" "), onpointerenter: show(words) }, svg("title", {}, words))];
}

const shorten = (name) => (name.length > 28 ? `${name.slice(0, 15)}…${name.slice(-11)}` : name);

function marks(found) {
  const loud = found.marks.filter((mark) => mark.kind !== "state").slice(-60).reverse();
  if (!loud.length) return null;
  return panel("What else happened", h("ul", { class: "marks" }, loud.map((mark) => h("li", { class: `m-${mark.kind}` }, h("span", { class: "when" }, moment(mark.time)), " ", h("b", {}, mark.kind), " ", h("span", { dir: "auto", title: where(mark.text) }, short(mark.text))))));
}
