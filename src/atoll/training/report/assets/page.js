"use strict";
/* Draws what the page carries in #data. Bars are painted pixel by pixel, so the time that a frame takes depends on the
   size of the canvas and on the bars in view, and not on how narrow these are. */
(() => {
  const PROGRAM = "program", GUTTER = 92, TALL = 20, THIN = 8, SPACE = 8, EMPTY = 255, PERIOD = 12;
  const TALLEST = 16000;  // pixels of a canvas
  const SERIES = ["var(--p)", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#8a8a8a"];
  const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 4", "12 4"];
  const COMPONENTS = {
    parameters: "#0072b2", gradients: "#e69f00", optimizer: "#009e73", gathered: "#56b4e9", buffers: "#f0e442",
    activations: "#cc79a7", pending: "#d55e00", passing: "#8a8a8a", context: "#b4a7d6",
  };
  const HATCHES = {
    "/": (x, y) => (x + y) % 6 < 2,
    "\\": (x, y) => (x - y + 72) % 6 < 2,
    "|": (x) => x % 4 < 2,
    "-": (x, y) => y % 4 < 2,
    ".": (x, y) => x % 4 < 2 && y % 4 < 2,
  };
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const rgb = (text) => { const c = d3.rgb(text); return [c.r, c.g, c.b]; };
  const abgr = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  const inkOn = (colour) => (d3.lab(colour).l > 50 ? "#111" : "#fff");
  const isRound = (value) => Math.abs(value - Math.round(value)) < 1e-9;

  // ---- numbers as people read them

  const digits = (value) => (value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2))
    .replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  function seconds(value) {
    if (value === 0) return "0 s";
    for (const [name, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]])
      if (value >= scale || name === "µs") return `${digits(value / scale)} ${name}`;
  }
  function bytes(value) {
    const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let at = 0;
    while (value >= 1023.5 && at < names.length - 1) { value /= 1024; at++; }
    return `${digits(value)} ${names[at]}`;
  }
  const plain = (value) => (Number.isFinite(value) ? d3.format(Math.abs(value) >= 1e4 ? ".4~s" : ".4~g")(value) : "–");

  // ---- what the page carries

  async function inflated(text) {
    const raw = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }

  async function readTimeline(given) {
    const total = d3.sum(given.rows, (row) => row[2]);
    const all = new Int32Array(await inflated(given.data));
    const column = (nth) => all.subarray(nth * total, (nth + 1) * total);
    const [gap, length, part, op, stage, microbatch, of, sent] = d3.range(8).map(column);
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
        held: d3.range(width).map((nth) => held.subarray(first * width + nth * count, first * width + (nth + 1) * count)),
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

  let charts = [], view = d3.zoomIdentity, longest = 1, pending = 0, stale = new Set(), kept = { scroll: {}, rank: {}, chosen: null, isShared: null };
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

  function show(next, from) {
    view = next;
    for (const chart of charts) if (chart instanceof Timelines && chart !== from) chart.follow(view);
    redraw(charts.filter((chart) => !(chart instanceof MetricChart)));
  }

  const lengthOf = (sheet) => d3.max(sheet.timelines, (each) => Math.max(each.seconds, d3.max(each.end) ?? 0)) || 1;
  const scaleOf = (width, sheet) => view.rescaleX(d3.scaleLinear([0, kept.isShared ? longest : sheet.length], [GUTTER, width]));

  // ---- timeline

  class Timelines {
    constructor(figure, sheet, nth) {
      Object.assign(this, { figure, sheet, nth, cursor: kept.chosen && kept.chosen.nth === nth ? kept.chosen : null });
      this.axis = d3.select(figure).append("svg").attr("class", "axis").attr("aria-hidden", "true");
      this.box = d3.select(figure).append("div").attr("class", "view").attr("tabindex", 0).attr("role", "group")
        .attr("aria-label", `Timeline of ${sheet.name}. Arrow keys move from bar to bar and from row to row, plus and ` +
          "minus zoom, zero shows the whole step.").attr("aria-describedby", "detail").node();
      this.canvas = d3.select(this.box).append("canvas").attr("aria-hidden", "true").node();
      this.spacer = d3.select(this.box).append("div").node();
      this.rows = [];
      this.widths = new Map();
      const ranks = d3.max(sheet.timelines, (each) => d3.max(each.rows, (row) => row.rank)) + 1;
      let top = SPACE / 2;
      for (let rank = 0; rank < ranks; rank++) {
        for (const source of sheet.timelines)
          for (const row of source.rows.filter((each) => each.rank === rank)) {
            const height = row.lane === PROGRAM ? TALL : THIN;
            const before = this.rows.at(-1), isFirst = !before || before.rank !== rank;
            const isNamed = isFirst || before.lane !== row.lane || before.source !== source;
            this.rows.push({ ...row, source, top, height, isFirst, isNamed });
            top += height + 2;
          }
        top += SPACE;
      }
      this.height = top;
      this.zoom = d3.zoom().scaleExtent([1, 1e6])
        .filter((event) => (event.type === "wheel" ? event.ctrlKey || event.metaKey : !event.button))
        .on("zoom", (event) => { if (event.sourceEvent) show(event.transform, this); });
      d3.select(this.canvas).call(this.zoom)
        .on("pointermove", (event) => this.point(event)).on("pointerleave", () => this.leave())
        .on("click", (event) => this.choose(this.at(event)));
      d3.select(this.box).on("keydown", (event) => this.key(event)).on("wheel", (event) => this.wheel(event))
        .on("scroll", () => { kept.scroll[nth] = this.box.scrollTop; redraw([this]); });
      this.resize();
      this.box.scrollTop = kept.scroll[nth] || 0;
    }

    resize(whole = false) {
      this.width = this.figure.clientWidth;
      this.visible = whole ? Math.min(this.height, TALLEST) : Math.min(this.height, Math.round(innerHeight * 0.68));
      this.ratio = whole ? Math.min(2, TALLEST / this.visible) : devicePixelRatio || 1;
      Object.assign(this.canvas.style, { width: `${this.width - 2}px`, height: `${this.visible}px` });
      this.box.style.height = `${this.visible + 2}px`;
      this.canvas.width = Math.round((this.width - 2) * this.ratio);
      this.canvas.height = Math.round(this.visible * this.ratio);
      this.spacer.style.height = `${this.height - this.visible}px`;
      this.context = this.canvas.getContext("2d", { alpha: false });
      this.image = this.context.createImageData(this.canvas.width, this.canvas.height);
      this.pixels = new Uint32Array(this.image.data.buffer);
      this.zoom.extent([[GUTTER, 0], [this.width, 1]]).translateExtent([[GUTTER, -Infinity], [this.width, Infinity]]);
      this.follow(view);
    }

    follow(next) { d3.select(this.canvas).property("__zoom", next); }

    // Palette by part and position, so that hatches lie still while the content moves.
    paint() {
      const key = `${style("--ground")} ${this.ratio}`;
      if (this.painted && this.painted.key === key) return this.painted;
      const ground = rgb(style("--ground")), table = new Uint32Array(256 * PERIOD * PERIOD).fill(abgr(ground));
      parts.forEach((part, nth) => {
        const ink = rgb(part.colour), soft = ink.map((each, at) => Math.round(0.18 * each + 0.82 * ground[at]));
        const unit = Math.max(1, Math.round(this.ratio));
        for (let y = 0; y < PERIOD; y++) for (let x = 0; x < PERIOD; x++) {
          const isInk = !part.hatch || HATCHES[part.hatch](Math.floor(x / unit), Math.floor(y / unit));
          table[(nth * PERIOD + y) * PERIOD + x] = abgr(isInk ? ink : soft);
        }
      });
      table.fill(abgr(rgb(style("--row"))), EMPTY * PERIOD * PERIOD);
      return (this.painted = { key, table, ground: abgr(ground) });
    }

    draw() {
      const { context, ratio, pixels } = this, scroll = this.box.scrollTop;
      const scale = scaleOf(this.width - 2, this.sheet), palette = this.paint(), drawn = [...scale.domain(), this.canvas.width].join();
      // Scrolling shows other rows at the same scale: what a row looks like is kept until the scale changes.
      if (drawn !== this.drawn) {
        this.drawn = drawn;
        for (const row of this.rows) row.line = row.words = null;
        const ticks = Math.max(3, (this.width - GUTTER) / 130);
        this.axis.attr("viewBox", `0 0 ${this.width} 26`).selectAll("g").data([0]).join("g").attr("transform", "translate(0,25)")
          .call(d3.axisTop(scale).ticks(ticks).tickFormat(seconds).tickSizeOuter(0));
      }
      this.theme = { ink: style("--ink"), quiet: style("--quiet"), ground: style("--ground") };
      pixels.fill(palette.ground);
      const shown = this.rows.filter((row) => row.top + row.height > scroll && row.top < scroll + this.visible);
      for (const row of shown) this.fill(row, (row.line ??= this.lined(row, scale)), palette, scroll);
      context.putImageData(this.image, 0, 0);
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.textBaseline = "middle";
      for (const row of shown) this.label(row, (row.words ??= row.lane === PROGRAM ? this.worded(row, scale) : []), scroll);
      this.mark(scale, scroll);
      context.setTransform(1, 0, 0, 1, 0, 0);
    }

    // The part that each pixel of a row shows.
    lined(row, scale) {
      const { ratio } = this, { start, end, part } = row.source, width = this.canvas.width;
      const edge = Math.round(GUTTER * ratio), [from, to] = scale.domain(), zero = scale(0) * ratio;
      const slope = (scale(1) - scale(0)) * ratio;
      const line = new Uint8Array(width).fill(EMPTY);
      // Bars that are narrower than a pixel share it: the part with most of it is shown.
      const share = new Float64Array(parts.length);
      let pixel = -1;
      const settle = () => {
        if (pixel >= edge && pixel < width) {
          let best = EMPTY, most = 0;
          for (let at = 0; at < share.length; at++) if (share[at] > most) { most = share[at]; best = at; }
          if (best !== EMPTY) line[pixel] = best;
        }
        share.fill(0);
      };
      const within = (at, value) => { if (at !== pixel) { settle(); pixel = at; } share[value] += 0; };
      for (let at = d3.bisectRight(end, from, row.first, row.last); at < row.last && start[at] < to; at++) {
        const left = zero + start[at] * slope, right = zero + end[at] * slope;
        const first = Math.floor(left), last = Math.floor(right), value = part[at];
        within(first, value);
        if (first === last) { share[value] += right - left; continue; }
        share[value] += first + 1 - left;
        const stop = right - left > 4 * ratio ? last - 1 : last;  // a gap tells wide bars apart
        const begin = Math.max(first + 1, edge), until = Math.min(stop, width);
        if (begin < until) line.fill(value, begin, until);
        within(last, value);
        if (stop === last) share[value] += right - last;
      }
      settle();
      return line;
    }

    fill(row, line, palette, scroll) {
      const { ratio, pixels } = this, width = this.canvas.width, edge = Math.round(GUTTER * ratio);
      const top = Math.round((row.top - scroll) * ratio), bottom = Math.round((row.top + row.height - scroll) * ratio);
      const { table } = palette, highest = Math.max(0, top), lowest = Math.min(bottom, this.canvas.height);
      for (let y = highest; y < lowest; y++) {
        const base = y * width;
        if (y - PERIOD >= highest) {
          pixels.copyWithin(base + edge, base - PERIOD * width + edge, base - PERIOD * width + width);
          continue;
        }
        const phase = ((y - top) % PERIOD) * PERIOD;
        for (let x = edge, turn = edge % PERIOD; x < width; x++) {
          pixels[base + x] = table[line[x] * PERIOD * PERIOD + phase + turn];
          if (++turn === PERIOD) turn = 0;
        }
      }
    }

    label(row, words, scroll) {
      const { context, sheet } = this, { source } = row, y = row.top - scroll + row.height / 2;
      context.textAlign = "right";
      context.fillStyle = this.theme.ink;
      context.font = "600 12px system-ui, 'DejaVu Sans', sans-serif";
      if (row.isFirst) { context.textAlign = "left"; context.fillText(String(row.rank), 6, y); context.textAlign = "right"; }
      context.font = `${row.lane === PROGRAM ? 11 : 9}px system-ui, 'DejaVu Sans', sans-serif`;
      context.fillStyle = this.theme.quiet;
      const word = row.lane === PROGRAM ? source.title.split(",")[0] : row.lane;
      if (row.isNamed && (row.lane !== PROGRAM || sheet.timelines.length > 1)) context.fillText(word, GUTTER - 6, y);
      context.textAlign = "center";
      context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
      for (const { part, text, middle, wide } of words) {
        const { hatch, ink } = parts[part];
        if (hatch) {
          context.fillStyle = this.theme.ground;
          context.fillRect(middle - wide / 2 - 3, y - 7, wide + 6, 14);
        }
        context.fillStyle = hatch ? this.theme.ink : ink;
        context.fillText(text, middle, y);
      }
    }

    // The words on a row: what, where, and on which part.
    worded(row, scale) {
      const { source } = row, [from, to] = scale.domain(), found = [];
      this.context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
      const write = ({ part, left, right }, text) => {
        const wide = this.wide(text), fits = wide <= right - left - 4;
        if (fits) found.push({ part, text, middle: (left + right) / 2, wide });
        return fits;
      };
      // A bar with room has its own words. Bars of one action that have none share its words.
      let group = null;
      const zero = scale(0), slope = scale(1) - zero;
      const words = (at, isShort) => {
        const name = source.names[source.op[at]], microbatch = source.microbatch[at];
        return (isShort ? name.split(" ")[0] : name) + (microbatch >= 0 ? ` ${microbatch}` : "");
      };
      const finish = () => {
        if (!group || group.count < 2 || group.right - group.left < 12) return;
        if (!write(group, words(group.at, true)) && group.microbatch >= 0) write(group, String(group.microbatch));
      };
      for (let at = d3.bisectRight(source.end, from, row.first, row.last); at < row.last && source.start[at] < to; at++) {
        const left = Math.max(zero + source.start[at] * slope, GUTTER), right = Math.min(zero + source.end[at] * slope, this.width);
        const part = source.part[at], microbatch = source.microbatch[at], stage = source.stage[at];
        const isWide = right - left >= 24;
        if (isWide) write({ part, left, right }, words(at, false));
        if (right - left < 0.5 && group && group.part !== part) continue;
        if (group && group.part === part && group.microbatch === microbatch && group.stage === stage && left - group.right < 1.5) {
          group.right = right;
          group.count += isWide ? -Infinity : 1;
          continue;
        }
        finish();
        group = { at, part, microbatch, stage, left, right, count: isWide ? -Infinity : 1 };
      }
      finish();
      return found;
    }

    wide(text) {
      if (!this.widths.has(text)) this.widths.set(text, this.context.measureText(text).width);
      return this.widths.get(text);
    }

    mark(scale, scroll) {
      const found = this.cursor;
      if (!found) return;
      const row = this.rows[found.row], { source } = row, { context } = this;
      const left = Math.max(GUTTER, scale(source.start[found.bar])), right = Math.max(left + 3, scale(source.end[found.bar]));
      context.lineWidth = 3;
      context.strokeStyle = this.theme.ground;
      context.strokeRect(left - 1, row.top - scroll - 1, right - left + 2, row.height + 2);
      context.lineWidth = 2;
      context.strokeStyle = this.theme.ink;
      context.strokeRect(left - 1, row.top - scroll - 1, right - left + 2, row.height + 2);
    }

    at(event) {
      const [x, y] = d3.pointer(event, this.canvas), down = y + this.box.scrollTop;
      const nth = this.rows.findIndex((row) => down >= row.top - 1 && down < row.top + row.height + 1);
      if (nth < 0 || x < GUTTER) return null;
      const row = this.rows[nth], scale = scaleOf(this.width - 2, this.sheet), near = scale.invert(x + 2), time = scale.invert(x);
      let bar = d3.bisectRight(row.source.start, near, row.first, row.last) - 1;
      while (bar > row.first && row.source.start[bar] > time && row.source.end[bar - 1] > time) bar--;
      return bar >= row.first && row.source.end[bar] >= scale.invert(x - 2) ? { nth: this.nth, row: nth, bar } : null;
    }

    words({ row, bar }) {
      const { sheet } = this, { source, rank, lane } = this.rows[row], part = parts[source.part[bar]];
      const [stage, microbatch, of] = ["stage", "microbatch", "of"].map((name) => source[name][bar]);
      const name = source.names[source.op[bar]], isBlock = name === "F" || name === "I";
      const what = of < 0 ? null : isBlock ? `block ${sheet.blocks[of] ?? of}` : `unit ${of}${sheet.units[of] ? ` (${sheet.units[of]})` : ""}`;
      const where = [stage >= 0 && `stage ${stage}`, microbatch >= 0 && `microbatch ${microbatch}`, what].filter(Boolean);
      const sent = source.bytes[source.sent[bar]], took = source.end[bar] - source.start[bar];
      return [
        `${name}: ${part.name}`,
        where.join(", "),
        `${seconds(took)}, from ${seconds(source.start[bar])} to ${seconds(source.end[bar])}` + (sent ? `, ${bytes(sent)}` : ""),
        `pipeline rank ${rank}, ${lane}, ${source.title}`,
      ].filter(Boolean);
    }

    point(event) {
      if (event.buttons) return hideTip();
      const found = this.at(event);
      if (!found) return hideTip();
      showTip(event.clientX, event.clientY, this.words(found).join("\n"));
    }

    leave() { hideTip(); }

    choose(found) {
      for (const chart of charts) if (chart instanceof Timelines) chart.cursor = null;
      this.cursor = kept.chosen = found;
      const said = document.getElementById("detail");
      said.textContent = found ? this.words(found).join(" · ") : "Point at a bar to see its instruction.";
      redraw(charts.filter((chart) => chart instanceof Timelines));
    }

    wheel(event) {
      const across = event.shiftKey ? event.deltaY : event.deltaX;
      if (event.ctrlKey || !across || view.k === 1) return;
      event.preventDefault();
      this.move(-across);
    }

    move(pixels) { d3.select(this.canvas).call(this.zoom.translateBy, pixels / view.k, 0); show(d3.zoomTransform(this.canvas), this); }

    scale(factor) {
      const at = this.cursor, scale = scaleOf(this.width - 2, this.sheet), row = at && this.rows[at.row];
      const middle = at ? scale((row.source.start[at.bar] + row.source.end[at.bar]) / 2) : (GUTTER + this.width) / 2;
      const centre = Math.min(Math.max(middle, GUTTER), this.width);
      d3.select(this.canvas).call(this.zoom.scaleBy, factor, [centre, 0]);
      show(d3.zoomTransform(this.canvas), this);
    }

    key(event) {
      const { key, shiftKey } = event;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (key === "+" || key === "=") this.scale(1.6);
      else if (key === "-" || key === "_") this.scale(1 / 1.6);
      else if (key === "0" || key === "Home") show(d3.zoomIdentity);
      else if (key === "Escape") this.choose(null);
      else if (shiftKey && key === "ArrowLeft") this.move(this.width / 4);
      else if (shiftKey && key === "ArrowRight") this.move(-this.width / 4);
      else if (key.startsWith("Arrow")) this.step(key);
      else return;
      event.preventDefault();
    }

    step(key) {
      let { row, bar } = this.cursor || { row: 0, bar: this.rows[0].first - 1 };
      const old = this.rows[row];
      if (key === "ArrowRight") bar = Math.min(bar + 1, old.last - 1);
      else if (key === "ArrowLeft") bar = Math.max(bar - 1, old.first);
      else {
        const middle = bar < old.first ? 0 : (old.source.start[bar] + old.source.end[bar]) / 2;
        row = Math.min(Math.max(row + (key === "ArrowDown" ? 1 : -1), 0), this.rows.length - 1);
        const next = this.rows[row];
        bar = Math.min(Math.max(d3.bisectRight(next.source.start, middle, next.first, next.last) - 1, next.first), next.last - 1);
      }
      this.choose({ nth: this.nth, row, bar });
      const { source, top, height } = this.rows[row], scale = scaleOf(this.width - 2, this.sheet);
      if (top < this.box.scrollTop) this.box.scrollTop = top - SPACE;
      if (top + height > this.box.scrollTop + this.visible) this.box.scrollTop = top + height + SPACE - this.visible;
      const left = scale(source.start[bar]), right = scale(source.end[bar]);
      if (left < GUTTER) this.move(GUTTER + 20 - left);
      else if (right > this.width) this.move(Math.max(this.width - 20 - right, GUTTER + 20 - left));
    }
  }

  // ---- memory

  class MemoryChart {
    constructor(figure, sheet, nth) {
      Object.assign(this, { figure, sheet, memory: sheet.memory });
      this.select = figure.querySelector("select");
      const fullest = d3.maxIndex(this.memory.ranks, (rank) => this.most(rank));
      this.select.value = String(kept.rank[nth] ?? fullest);
      this.select.addEventListener("change", () => { kept.rank[nth] = +this.select.value; redraw(); });
      this.svg = d3.select(figure).append("svg").attr("class", "chart").attr("role", "img").attr("tabindex", 0);
      this.note = d3.select(figure).append("output");
      this.svg.on("pointermove", (event) => this.point(d3.pointer(event, this.svg.node())[0])).on("pointerleave", hideTip)
        .on("keydown", (event) => {
          if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
          event.preventDefault();
          this.point(Math.min(Math.max((this.cross ?? GUTTER) + (event.key === "ArrowLeft" ? -8 : 8), GUTTER), this.width - 8));
        });
      this.resize();
    }

    most(rank) { return d3.max(rank.totals); }

    resize() { this.width = this.figure.clientWidth; }

    scale() {
      if (this.memory.unit === "s") return scaleOf(this.width - 8, this.sheet);
      return d3.scaleLinear([0, d3.max(this.memory.ranks, (rank) => rank.times.at(-1))], [GUTTER, this.width - 8]);
    }

    // One sample a pixel: the one in it that holds most.
    samples(rank, scale) {
      const { times } = rank, found = [], [from, to] = scale.domain(), zero = scale(0), slope = scale(1) - zero;
      let pixel = -1;
      for (let at = Math.max(0, d3.bisectRight(times, from) - 1); at < times.length && times[at] < to; at++) {
        const x = Math.max(GUTTER, zero + times[at] * slope), total = rank.totals[at];
        if (Math.floor(x) === pixel && found.length) {
          if (total > found.at(-1).total) Object.assign(found.at(-1), { at, total });
        } else { found.push({ x, at, total }); pixel = Math.floor(x); }
      }
      return found;
    }

    draw() {
      const { memory, width } = this, nth = +this.select.value, rank = memory.ranks[nth], height = 240, base = height - 24;
      const scale = this.scale(), found = this.samples(rank, scale), peak = this.most(rank), measured = memory.peaks[nth];
      // What is far above the peak is said below the chart, where it does not flatten it.
      const lines = [["device", memory.limit, "7 3"], [`measured, ${memory.measured}`, measured, "2 3"]].filter((each) => each[1]);
      const near = lines.filter((each) => each[1] < 2.5 * peak), far = lines.filter((each) => each[1] >= 2.5 * peak);
      const y = d3.scaleLinear([0, 1.08 * Math.max(peak, ...near.map((each) => each[1])) || 1], [base, 12]);
      const right = width - 8, last = Math.min(right, memory.unit === "s" ? scale(this.sheet.timelines[0].seconds) : right);
      const points = found.length ? [...found, { ...found.at(-1), x: Math.max(last, found.at(-1).x) }] : [];
      const below = new Float64Array(points.length);
      const areas = !points.length ? [] : memory.components.map((name, at) => {
        const low = Float64Array.from(below);
        points.forEach((point, i) => { below[i] += rank.held[at][point.at]; });
        const area = d3.area().curve(d3.curveStepAfter).x((point) => point.x).y0((_, i) => y(low[i])).y1((_, i) => y(low[i] + rank.held[at][points[i].at]));
        const wide = d3.maxIndex(points, (point) => rank.held[at][point.at]);
        const tall = y(low[wide]) - y(low[wide] + rank.held[at][points[wide].at]);
        return { name, d: area(points), x: points[wide].x, y: y(low[wide]) - tall / 2, tall };
      });
      const colour = (name) => COMPONENTS[name] || "#8a8a8a";
      this.svg.attr("viewBox", `0 0 ${width} ${height}`).attr("height", height).attr("aria-label",
        `Memory of pipeline rank ${nth}: predicted peak ${bytes(peak)}` + (measured ? `, measured ${bytes(measured)} (${memory.measured})` : "") +
        (memory.limit ? `, device ${bytes(memory.limit)}` : ""));
      this.svg.selectAll("*").remove();
      this.svg.append("g").selectAll("path").data(areas).join("path").attr("d", (each) => each.d).attr("fill", (each) => colour(each.name))
        .attr("stroke", style("--ground")).attr("stroke-width", 0.7);
      this.svg.append("g").selectAll("text").data(areas.filter((each) => each.tall > 15)).join("text").text((each) => each.name)
        .attr("x", (each) => Math.min(Math.max(each.x, GUTTER + 50), right - 50)).attr("y", (each) => each.y + 4).attr("text-anchor", "middle")
        .style("fill", (each) => inkOn(colour(each.name)));
      for (const [name, value, dash] of near) {
        this.svg.append("line").attr("x1", GUTTER).attr("x2", right).attr("y1", y(value)).attr("y2", y(value)).attr("stroke", style("--ink")).attr("stroke-dasharray", dash);
        this.svg.append("text").attr("x", right - 4).attr("y", y(value) - 4).attr("text-anchor", "end").text(`${name} ${bytes(value)}`);
      }
      const format = memory.unit === "s" ? seconds : d3.format("d");
      this.svg.append("g").attr("transform", `translate(0,${base})`).call(d3.axisBottom(scale).ticks(Math.max(2, width / 140)).tickFormat(format).tickSizeOuter(0));
      this.svg.append("g").attr("transform", `translate(${GUTTER},0)`).call(d3.axisLeft(y).tickValues(binary(y.domain()[1])).tickFormat(bytes));
      this.line = this.svg.append("line").attr("class", "cross").attr("y1", 12).attr("y2", base).attr("visibility", "hidden");
      if (!this.pointed) this.note.text([`predicted peak ${bytes(peak)}`, ...far.map(([name, value]) => `${name} ${bytes(value)}, above the chart`)].join("; "));
      Object.assign(this, { rank, shownScale: scale });
    }

    point(x) {
      if (!this.rank || x < GUTTER || x > this.width) return;
      const { rank, memory } = this, at = Math.max(0, d3.bisectRight(rank.times, this.shownScale.invert(x)) - 1);
      this.cross = x;
      this.pointed = true;
      this.line.attr("x1", x).attr("x2", x).attr("visibility", "visible");
      const held = memory.components.map((name, nth) => [name, rank.held[nth][at]]).filter((each) => each[1] > 0);
      const when = memory.unit === "s" ? `at ${seconds(rank.times[at])}` : `after instruction ${rank.times[at]}`;
      this.note.text(`${when}: ${bytes(d3.sum(held, (each) => each[1]))} = ` + held.map(([name, value]) => `${name} ${bytes(value)}`).join(" + "));
    }
  }

  function binary(most) {
    const step = 2 ** Math.max(0, Math.ceil(Math.log2(most / 5)));
    return d3.range(0, most, step);
  }

  // ---- metrics

  const METRICS = {
    loss: "loss", grad_norm: "gradient norm, before clipping", tokens_per_second: "tokens a second", seconds: "seconds of a step",
    lr: "learning rate", bubble: "bubble", memory_bytes: "memory of the fullest rank",
  };

  class MetricChart {
    constructor(figure, name) {
      Object.assign(this, { figure, name });
      this.curves = sheets.flatMap((sheet, nth) => {
        const { training, validation } = sheet.curves, own = training[name] ? [{ label: sheet.name, nth, x: training.step, y: training[name] }] : [];
        if (name === "loss" && validation.loss && validation.loss.length) own.push({ label: `${sheet.name}, validation`, nth, x: validation.step, y: validation.loss, isDots: true });
        return own;
      });
      d3.select(figure).append("h3").text(METRICS[name] || name);
      this.svg = d3.select(figure).append("svg").attr("class", "chart").attr("role", "img").attr("tabindex", 0);
      this.note = d3.select(figure).append("output");
      this.svg.on("pointermove", (event) => this.point(this.scale.invert(d3.pointer(event, this.svg.node())[0])))
        .on("keydown", (event) => {
          if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
          event.preventDefault();
          this.point((this.at ?? this.scale.domain()[0]) + (event.key === "ArrowLeft" ? -1 : 1));
        });
      this.resize();
    }

    resize() { this.width = this.figure.clientWidth; }

    value(y) { return this.name === "memory_bytes" ? bytes(y) : this.name === "seconds" ? seconds(y) : this.name === "bubble" ? `${(100 * y).toFixed(1)} %` : plain(y); }

    // Ticks that read alike say nothing.
    told(ticks) { return ticks.filter((each, at) => !at || this.value(each) !== this.value(ticks[at - 1])); }

    // The least and the most of each pixel: no spike is lost.
    thinned(curve) {
      const columns = new Map();
      for (let at = 0; at < curve.x.length; at++) {
        const y = curve.y[at], pixel = Math.floor(this.scale(curve.x[at]));
        if (!Number.isFinite(y)) continue;
        const own = columns.get(pixel);
        if (!own) columns.set(pixel, [at, at]);
        else { if (y < curve.y[own[0]]) own[0] = at; if (y > curve.y[own[1]]) own[1] = at; }
      }
      return [...columns.values()].flatMap(([low, high]) => (low === high ? [low] : [Math.min(low, high), Math.max(low, high)]));
    }

    draw() {
      const { width, curves } = this, height = 190, base = height - 24;
      const all = curves.flatMap((curve) => d3.extent(curve.x)), domain = d3.extent(all);
      this.scale = d3.scaleLinear(domain[0] === domain[1] ? [domain[0] - 1, domain[1] + 1] : domain, [62, width - 10]);
      const [low, high] = d3.extent(curves.flatMap((curve) => d3.extent(curve.y.filter(Number.isFinite))));
      const pad = (high - low || Math.abs(high) || 1) * 0.06, y = d3.scaleLinear([low - pad, high + pad], [base, 10]);
      this.svg.attr("viewBox", `0 0 ${width} ${height}`).attr("height", height).attr("aria-label",
        `${METRICS[this.name] || this.name} by step: ` + curves.map((curve) => `${curve.label} ends at ${this.value(curve.y.at(-1))}`).join("; "));
      this.svg.selectAll("*").remove();
      for (const curve of curves) {
        const kept = this.thinned(curve), colour = SERIES[curve.nth % SERIES.length];
        const line = d3.line((at) => this.scale(curve.x[at]), (at) => y(curve.y[at]));
        if (curve.isDots) this.svg.append("g").selectAll("path").data(kept).join("path").attr("d", d3.symbol(d3.symbolDiamond, 46))
          .attr("transform", (at) => `translate(${this.scale(curve.x[at])},${y(curve.y[at])})`).attr("fill", colour).attr("stroke", style("--ground"));
        else {
          this.svg.append("path").attr("d", line(kept)).attr("fill", "none").attr("stroke", colour).attr("stroke-width", 1.8).attr("stroke-dasharray", DASHES[curve.nth % DASHES.length]);
          if (kept.length === 1) this.svg.append("circle").attr("cx", this.scale(curve.x[kept[0]])).attr("cy", y(curve.y[kept[0]])).attr("r", 3).attr("fill", colour);
        }
      }
      const whole = this.scale.ticks(Math.max(2, width / 90)).filter(isRound);
      this.svg.append("g").attr("transform", `translate(0,${base})`).call(d3.axisBottom(this.scale).tickValues(whole).tickFormat(d3.format("d")).tickSizeOuter(0));
      this.svg.append("g").attr("transform", "translate(62,0)").call(d3.axisLeft(y).tickValues(this.told(y.ticks(5))).tickFormat((each) => this.value(each)));
      this.line = this.svg.append("line").attr("class", "cross").attr("y1", 10).attr("y2", base).attr("visibility", "hidden");
      const last = d3.max(all);
      this.say(this.at === undefined ? last : Math.min(this.at, last));
    }

    point(step) {
      const [first, last] = this.scale.domain();
      this.at = Math.round(Math.min(Math.max(step, first), last));
      this.line.attr("x1", this.scale(this.at)).attr("x2", this.scale(this.at)).attr("visibility", "visible");
      this.say(this.at);
    }

    say(step) {
      const said = this.curves.map((curve) => {
        const at = Math.max(0, d3.bisectRight(curve.x, step) - 1);
        return curve.x.length ? `${curve.label}: ${this.value(curve.y[at])}` : "";
      });
      this.note.text(`step ${step} · ${said.filter(Boolean).join(" · ")}`);
    }
  }

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
    longest = d3.max(lengths) || 1;
    kept.isShared ??= longest < 20 * d3.min(lengths);
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
      } else if (button.dataset.act === "all") show(d3.zoomIdentity);
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
})();
