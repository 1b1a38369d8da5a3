// ---- metrics

const SERIES = ["var(--p)", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#8a8a8a"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 4", "12 4"];
const DIAMOND = "M0,-6.312L3.644,0L0,6.312L-3.644,0Z";
const isRound = (value) => Math.abs(value - Math.round(value)) < 1e-9;
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
    add(figure, "h3", {}, METRICS[name] || name);
    this.svg = add(figure, "svg", { class: "chart", role: "img", tabindex: 0 });
    this.note = add(figure, "output");
    this.svg.addEventListener("pointermove", (event) => this.point(this.scale.invert(xyIn(this.svg, event)[0])));
    this.svg.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      event.preventDefault();
      this.point((this.at ?? this.scale.domain[0]) + (event.key === "ArrowLeft" ? -1 : 1));
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
    const { width, curves, svg } = this, height = 190, base = height - 24;
    const all = curves.flatMap((curve) => extent(curve.x)), domain = extent(all);
    this.scale = linear(domain[0] === domain[1] ? [domain[0] - 1, domain[1] + 1] : domain, [62, width - 10]);
    const [low, high] = extent(curves.flatMap((curve) => extent(curve.y.filter(Number.isFinite))));
    const pad = (high - low || Math.abs(high) || 1) * 0.06, y = linear([low - pad, high + pad], [base, 10]);
    set(svg, {
      viewBox: `0 0 ${width} ${height}`, height,
      "aria-label": `${METRICS[this.name] || this.name} by step: ` +
        curves.map((curve) => `${curve.label} ends at ${this.value(curve.y.at(-1))}`).join("; "),
    });
    const ground = style("--ground");
    svg.replaceChildren();
    for (const curve of curves) {
      const points = this.thinned(curve).map((at) => [this.scale(curve.x[at]), y(curve.y[at])]);
      const fill = SERIES[curve.nth % SERIES.length];
      if (curve.isDots) for (const [x, y] of points)
        add(svg, "path", { d: DIAMOND, transform: `translate(${x},${y})`, fill, stroke: ground });
      else if (points.length === 1) add(svg, "circle", { cx: points[0][0], cy: points[0][1], r: 3, fill });
      else add(svg, "path", {
        d: pathOf(points), fill: "none", stroke: fill, "stroke-width": 1.8, "stroke-dasharray": DASHES[curve.nth % DASHES.length],
      });
    }
    axis(svg, "bottom", [0, base], this.scale, ticksOf(this.scale.domain, Math.max(2, width / 90)).filter(isRound), integer);
    axis(svg, "left", [62, 0], y, this.told(ticksOf(y.domain, 5)), (each) => this.value(each));
    this.line = add(svg, "line", { class: "cross", y1: 10, y2: base, visibility: "hidden" });
    const last = mostOf(all);
    this.say(this.at === undefined ? last : Math.min(this.at, last));
  }

  point(step) {
    const [first, last] = this.scale.domain;
    this.at = Math.round(Math.min(Math.max(step, first), last));
    set(this.line, { x1: this.scale(this.at), x2: this.scale(this.at), visibility: "visible" });
    this.say(this.at);
  }

  say(step) {
    const said = this.curves.map((curve) => {
      const at = Math.max(0, firstAbove(curve.x, step) - 1);
      return curve.x.length ? `${curve.label}: ${this.value(curve.y[at])}` : "";
    });
    this.note.textContent = `step ${step} · ${said.filter(Boolean).join(" · ")}`;
  }
}
