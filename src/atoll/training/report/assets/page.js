/* Reads what the page carries in #data, and draws it. */

const GUTTER = 92;  // pixels before the charts, for their names
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- what the page carries

async function inflated(text) {
  const raw = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function readTimeline(given) {
  const total = sum(given.rows.map((row) => row[2]));
  const all = new Int32Array(await inflated(given.data));
  const column = (nth) => all.subarray(nth * total, (nth + 1) * total);
  const [gap, length, part, op, stage, microbatch, of, sent] = upTo(8).map(column);
  const start = new Float64Array(total), end = new Float64Array(total);
  let first = 0;
  const rows = given.rows.map(([rank, lane, count]) => {
    let ticks = 0;
    for (let at = first; at < first + count; at++) {
      ticks += gap[at];
      start[at] = ticks * given.tick;
      ticks += length[at];
      end[at] = ticks * given.tick;
    }
    const row = { rank, lane, first, last: first + count };
    first += count;
    return row;
  });
  return { ...given, rows, start, end, part, op, stage, microbatch, of, sent };
}

async function readMemory(given) {
  if (!given) return null;
  const times = new Float64Array(await inflated(given.times)), held = new Float32Array(await inflated(given.held));
  const width = given.components.length;
  let first = 0;
  const ranks = given.counts.map((count) => {
    const rank = {
      times: times.subarray(first, first + count),
      held: upTo(width).map((nth) => held.subarray(first * width + nth * count, first * width + (nth + 1) * count)),
      totals: new Float64Array(count),
    };
    for (const each of rank.held) for (let at = 0; at < count; at++) rank.totals[at] += each[at];
    first += count;
    return rank;
  });
  return { ...given, ranks };
}

async function readCurves(given) {
  const all = new Float64Array(await inflated(given.data)), found = {};
  given.columns.forEach((name, nth) => { found[name] = all.subarray(nth * given.count, (nth + 1) * given.count); });
  return found;
}

// ---- a shared view of time

let charts = [], view = new View(), longest = 1, pending = 0, stale = new Set(), kept = { scroll: {}, rank: {}, chosen: null, isShared: null };
const frames = { drawn: 0, last: 0 };

function redraw(some = charts) {
  for (const chart of some) stale.add(chart);
  if (!pending) pending = requestAnimationFrame(() => {
    pending = 0;
    const begun = performance.now();
    for (const chart of stale) if (charts.includes(chart)) chart.draw();
    stale.clear();
    frames.drawn++;
    frames.last = performance.now() - begun;
  });
}

function show(next) {
  view = next;
  redraw(charts.filter((chart) => !(chart instanceof MetricChart)));
}

const lengthOf = (sheet) => mostOf(sheet.timelines.map((each) => Math.max(each.seconds, mostOf(each.end) ?? 0))) || 1;
const scaleOf = (width, sheet) => view.of(linear([0, kept.isShared ? longest : sheet.length], [GUTTER, width]));

// ---- the page

const tip = () => document.getElementById("tip");
function showTip(x, y, text) {
  const box = tip();
  box.textContent = text;
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 4))}px`;
  box.style.top = `${y + 18 + height > innerHeight ? y - height - 12 : y + 18}px`;
}
function hideTip() { tip().hidden = true; }

let parts = [], sheets = [];

// What is read takes a moment, so a newer content takes the old one's place only when its charts can be drawn.
async function begin(main) {
  const data = JSON.parse(main.querySelector("#data").textContent);
  if (typeof DecompressionStream === "undefined") throw new Error("this browser has no DecompressionStream (Chrome 80, Firefox 113 and Safari 16.4 have it)");
  const read = await Promise.all(data.sheets.map(async (sheet) => ({
    ...sheet,
    timelines: await Promise.all(sheet.timelines.map(readTimeline)),
    memory: await readMemory(sheet.memory),
    curves: { training: await readCurves(sheet.curves.training), validation: await readCurves(sheet.curves.validation) },
  })));
  const stops = () => [...document.querySelectorAll("[tabindex],button,select,a")];
  const focused = stops().indexOf(document.activeElement), old = document.querySelector("main");
  if (main !== old) old.replaceWith(document.adoptNode(main));
  parts = data.parts.map((part) => ({ ...part, ink: inkOn(part.colour) }));
  sheets = read;
  for (const sheet of sheets) sheet.length = lengthOf(sheet);
  const lengths = sheets.filter((sheet) => sheet.timelines.length).map((sheet) => sheet.length);
  const [least, most] = extent(lengths);
  longest = most || 1;
  kept.isShared ??= longest < 20 * least;
  const of = (selector, make) => [...document.querySelectorAll(selector)].map(make);
  charts = [
    ...of("figure.timeline", (figure) => new Timelines(figure, sheets[figure.dataset.sheet], +figure.dataset.sheet)),
    ...of("figure.memory", (figure) => new MemoryChart(figure, sheets[figure.dataset.sheet], +figure.dataset.sheet)),
    ...of("figure.metric", (figure) => new MetricChart(figure, figure.dataset.metric)),
  ];
  const first = charts.find((chart) => chart instanceof Timelines);
  const same = document.querySelector("[data-act=same]");
  if (same) same.setAttribute("aria-pressed", kept.isShared);
  for (const button of document.querySelectorAll("[data-act]")) button.addEventListener("click", () => {
    if (button === same) {
      kept.isShared = !kept.isShared;
      same.setAttribute("aria-pressed", kept.isShared);
      redraw();
    } else if (button.dataset.act === "all") show(new View());
    else (charts.find((chart) => chart.cursor) || first).scale(button.dataset.act === "in" ? 1.6 : 1 / 1.6);
  });
  if (kept.chosen && charts.some((chart) => chart.cursor)) charts.find((chart) => chart.cursor).choose(kept.chosen);
  for (const chart of charts) chart.draw();
  if (main !== old && focused >= 0) stops()[focused]?.focus({ preventScroll: true });
  document.documentElement.dataset.ready = "1";
}

function trouble(error) {
  const box = document.getElementById("trouble");
  box.hidden = false;
  box.textContent = `Timeline, memory and metrics cannot be drawn: ${error.message}. Tables and words are complete.`;
  document.documentElement.dataset.ready = "1";
}

function resize(whole = false) {
  for (const chart of charts) chart.resize(whole);
  for (const chart of charts) chart.draw();
}

addEventListener("resize", () => { resize(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
addEventListener("beforeprint", () => { document.documentElement.classList.add("printing"); resize(true); });
addEventListener("afterprint", () => { document.documentElement.classList.remove("printing"); resize(); });

// A live page asks for a newer one, and keeps where its reader is.
async function watch() {
  let tag = document.documentElement.dataset.live;
  for (;;) {
    try {
      const answer = await fetch("/report", { headers: { "If-None-Match": tag }, cache: "no-store" });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        const next = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
        await begin(next);
      }
    } catch { /* the server has ended, or will answer later */ }
    await new Promise((done) => setTimeout(done, 1000));
  }
}

globalThis.atollReport = { frames, get view() { return view; }, get charts() { return charts; } };
begin(document.querySelector("main")).catch(trouble).then(() => { if (document.documentElement.dataset.live) watch(); });
