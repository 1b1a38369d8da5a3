// ---- timeline

const PROGRAM = "program", TALL = 20, THIN = 8, SPACE = 8, EMPTY = 255, PERIOD = 12;
const TALLEST = 16000;  // pixels of a canvas
const HATCHES = {
  "/": (x, y) => (x + y) % 6 < 2,
  "\\": (x, y) => (x - y + 72) % 6 < 2,
  "|": (x) => x % 4 < 2,
  "-": (x, y) => y % 4 < 2,
  ".": (x, y) => x % 4 < 2 && y % 4 < 2,
  "x": (x, y) => (x + y) % 6 < 1 || (x - y + 72) % 6 < 1,
};
const abgr = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

/* Bars are painted pixel by pixel, so the time that a frame takes depends on the size of the canvas and on the bars in
   view, and not on how narrow these are. */
class Timelines {
  constructor(figure, sheet, nth) {
    Object.assign(this, { figure, sheet, nth, cursor: kept.chosen && kept.chosen.nth === nth ? kept.chosen : null });
    this.axis = add(figure, "svg", { class: "axis", "aria-hidden": "true" });
    this.box = add(figure, "div", {
      class: "view", tabindex: 0, role: "group", "aria-describedby": "detail",
      "aria-label": `Timeline of ${sheet.name}. Arrow keys move from bar to bar and from row to row, plus and minus zoom, ` +
        "zero shows the whole step.",
    });
    this.canvas = add(this.box, "canvas", { "aria-hidden": "true" });
    this.spacer = add(this.box, "div");
    this.rows = [];
    this.widths = new Map();
    const ranks = mostOf(sheet.timelines.flatMap((each) => each.rows.map((row) => row.rank))) + 1;
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
    this.zoom = new Zoom(this.canvas, () => [GUTTER, this.width], () => view, show);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", hideTip);
    this.canvas.addEventListener("click", (event) => { if (!this.zoom.hasMoved) this.choose(this.at(event)); });
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.box.addEventListener("scroll", () => { kept.scroll[nth] = this.box.scrollTop; redraw([this]); });
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
  }

  // The scale of what is seen of the step.
  seen() { return scaleOf(this.width - 2, this.sheet); }

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
    const scale = this.seen(), palette = this.paint(), drawn = [...scale.domain, this.canvas.width].join();
    // Scrolling shows other rows at the same scale: what a row looks like is kept until the scale changes.
    if (drawn !== this.drawn) {
      this.drawn = drawn;
      for (const row of this.rows) row.line = row.words = null;
      this.axis.setAttribute("viewBox", `0 0 ${this.width} 26`);
      this.axis.replaceChildren();
      axis(this.axis, "top", [0, 25], scale, ticksOf(scale.domain, Math.max(3, (this.width - GUTTER) / 130)), seconds);
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
    const edge = Math.round(GUTTER * ratio), [from, to] = scale.domain, zero = scale(0) * ratio;
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
    for (let at = firstAbove(end, from, row.first, row.last); at < row.last && start[at] < to; at++) {
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
    const { source } = row, [from, to] = scale.domain, found = [];
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
    for (let at = firstAbove(source.end, from, row.first, row.last); at < row.last && source.start[at] < to; at++) {
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
    const [x, y] = this.zoom.xy(event), down = y + this.box.scrollTop;
    const nth = this.rows.findIndex((row) => down >= row.top - 1 && down < row.top + row.height + 1);
    if (nth < 0 || x < GUTTER) return null;
    const row = this.rows[nth], scale = this.seen(), near = scale.invert(x + 2), time = scale.invert(x);
    let bar = firstAbove(row.source.start, near, row.first, row.last) - 1;
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
    this.zoom.by(-across);
  }

  scale(factor) {
    const at = this.cursor, scale = this.seen(), row = at && this.rows[at.row];
    const middle = at ? scale((row.source.start[at.bar] + row.source.end[at.bar]) / 2) : (GUTTER + this.width) / 2;
    this.zoom.times(factor, clamp(middle, GUTTER, this.width));
  }

  key(event) {
    const { key, shiftKey } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (key === "+" || key === "=") this.scale(1.6);
    else if (key === "-" || key === "_") this.scale(1 / 1.6);
    else if (key === "0" || key === "Home") show(new View());
    else if (key === "Escape") this.choose(null);
    else if (shiftKey && key === "ArrowLeft") this.zoom.by(this.width / 4);
    else if (shiftKey && key === "ArrowRight") this.zoom.by(-this.width / 4);
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
      bar = Math.min(Math.max(firstAbove(next.source.start, middle, next.first, next.last) - 1, next.first), next.last - 1);
    }
    this.choose({ nth: this.nth, row, bar });
    const { source, top, height } = this.rows[row], scale = this.seen();
    if (top < this.box.scrollTop) this.box.scrollTop = top - SPACE;
    if (top + height > this.box.scrollTop + this.visible) this.box.scrollTop = top + height + SPACE - this.visible;
    const left = scale(source.start[bar]), right = scale(source.end[bar]);
    if (left < GUTTER) this.zoom.by(GUTTER + 20 - left);
    else if (right > this.width) this.zoom.by(Math.max(this.width - 20 - right, GUTTER + 20 - left));
  }
}
