// ---- memory

const COMPONENTS = {
  parameters: "#0072b2", gradients: "#e69f00", optimizer: "#009e73", gathered: "#56b4e9", buffers: "#f0e442",
  activations: "#cc79a7", pending: "#d55e00", passing: "#8a8a8a", context: "#b4a7d6",
};

class MemoryChart {
  constructor(figure, sheet, nth) {
    Object.assign(this, { figure, sheet, memory: sheet.memory });
    this.select = figure.querySelector("select");
    const fullest = indexOfMost(this.memory.ranks.map((rank) => mostOf(rank.totals)));
    this.select.value = String(kept.rank[nth] ?? fullest);
    this.select.addEventListener("change", () => { kept.rank[nth] = +this.select.value; redraw(); });
    this.svg = add(figure, "svg", { class: "chart", role: "img", tabindex: 0 });
    this.note = add(figure, "output");
    this.svg.addEventListener("pointermove", (event) => this.point(xyIn(this.svg, event)[0]));
    this.svg.addEventListener("pointerleave", hideTip);
    this.svg.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      event.preventDefault();
      this.point(clamp((this.cross ?? GUTTER) + (event.key === "ArrowLeft" ? -8 : 8), GUTTER, this.width - 8));
    });
    this.resize();
  }

  resize() { this.width = this.figure.clientWidth; }

  scale() {
    if (this.memory.unit === "s") return scaleOf(this.width - 8, this.sheet);
    return linear([0, mostOf(this.memory.ranks.map((rank) => rank.times.at(-1)))], [GUTTER, this.width - 8]);
  }

  // One sample a pixel: the one in it that holds most.
  samples(rank, scale) {
    const { times } = rank, found = [], [from, to] = scale.domain, zero = scale(0), slope = scale(1) - zero;
    let pixel = -1;
    for (let at = Math.max(0, firstAbove(times, from) - 1); at < times.length && times[at] < to; at++) {
      const x = Math.max(GUTTER, zero + times[at] * slope), total = rank.totals[at];
      if (Math.floor(x) === pixel && found.length) {
        if (total > found.at(-1).total) Object.assign(found.at(-1), { at, total });
      } else { found.push({ x, at, total }); pixel = Math.floor(x); }
    }
    return found;
  }

  draw() {
    const { memory, width } = this, nth = +this.select.value, rank = memory.ranks[nth], height = 240, base = height - 24;
    const scale = this.scale(), found = this.samples(rank, scale), peak = mostOf(rank.totals), measured = memory.peaks[nth], limit = memory.limits[nth];
    // What is far above the peak is said below the chart, where it does not flatten it.
    const lines = [["device", limit, "7 3"], [`measured, ${memory.measured}`, measured, "2 3"]].filter((each) => each[1]);
    const near = lines.filter((each) => each[1] < 2.5 * peak), far = lines.filter((each) => each[1] >= 2.5 * peak);
    const y = linear([0, 1.08 * Math.max(peak, ...near.map((each) => each[1])) || 1], [base, 12]);
    const right = width - 8, last = Math.min(right, memory.unit === "s" ? scale(this.sheet.timelines[0].seconds) : right);
    const points = found.length ? [...found, { ...found.at(-1), x: Math.max(last, found.at(-1).x) }] : [];
    const below = new Float64Array(points.length);
    const areas = !points.length ? [] : memory.components.map((name, at) => {
      const low = Float64Array.from(below);
      points.forEach((point, i) => { below[i] += rank.held[at][point.at]; });
      const corners = points.map((point, i) => [point.x, y(low[i]), y(below[i])]);
      const [x, bottom, top] = corners[indexOfMost(points.map((point) => rank.held[at][point.at]))];
      return { name, d: areaOf(corners), x, y: (bottom + top) / 2, tall: bottom - top };
    });
    const colour = (name) => COMPONENTS[name] || "#8a8a8a";
    const { svg } = this;
    set(svg, {
      viewBox: `0 0 ${width} ${height}`, height,
      "aria-label": `Memory of pipeline rank ${nth}: predicted peak ${bytes(peak)}` +
        (measured ? `, measured ${bytes(measured)} (${memory.measured})` : "") + (limit ? `, device ${bytes(limit)}` : ""),
    });
    const ground = style("--ground"), ink = style("--ink");  // read before what makes styles anew
    svg.replaceChildren();
    for (const { name, d } of areas) add(svg, "path", { d, fill: colour(name), stroke: ground, "stroke-width": 0.7 });
    // A name is written only where its area is behind it.
    const isWide = points.length && points.at(-1).x - points[0].x > 100;
    for (const { name, x, y, tall } of areas) if (isWide && tall > 15)
      add(svg, "text", { x: clamp(x, GUTTER + 50, right - 50), y: y + 4, "text-anchor": "middle" }, name).style.fill = inkOn(colour(name));
    for (const [name, value, dash] of near) {
      add(svg, "line", { x1: GUTTER, x2: right, y1: y(value), y2: y(value), stroke: ink, "stroke-dasharray": dash });
      add(svg, "text", { x: right - 4, y: y(value) - 4, "text-anchor": "end" }, `${name} ${bytes(value)}`);
    }
    const format = memory.unit === "s" ? seconds : integer;
    axis(svg, "bottom", [0, base], scale, ticksOf(scale.domain, Math.max(2, width / 140)), format);
    axis(svg, "left", [GUTTER, 0], y, binary(y.domain[1]), bytes);
    this.line = add(svg, "line", { class: "cross", y1: 12, y2: base, visibility: "hidden" });
    if (!this.pointed) this.note.textContent = [`predicted peak ${bytes(peak)}`, ...far.map(([name, value]) => `${name} ${bytes(value)}, above the chart`)].join("; ");
    Object.assign(this, { rank, shownScale: scale });
  }

  point(x) {
    if (!this.rank || x < GUTTER || x > this.width) return;
    const { rank, memory } = this, at = Math.max(0, firstAbove(rank.times, this.shownScale.invert(x)) - 1);
    this.cross = x;
    this.pointed = true;
    set(this.line, { x1: x, x2: x, visibility: "visible" });
    const held = memory.components.map((name, nth) => [name, rank.held[nth][at]]).filter((each) => each[1] > 0);
    const when = memory.unit === "s" ? `at ${seconds(rank.times[at])}` : `after instruction ${rank.times[at]}`;
    this.note.textContent = `${when}: ${bytes(sum(held.map((each) => each[1])))} = ` + held.map(([name, value]) => `${name} ${bytes(value)}`).join(" + ");
  }
}

function binary(most) {
  const step = 2 ** Math.max(0, Math.ceil(Math.log2(most / 5)));
  return upTo(Math.ceil(most / step)).map((nth) => nth * step);
}
