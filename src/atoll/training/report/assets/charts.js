/* What charts are made of: numbers as people read them, scales, ticks, axes, and a view that is zoomed. Knows nothing
   of plans. */

// ---- values

const clamp = (value, least, most) => Math.min(Math.max(value, least), most);
const upTo = (length) => Array.from({ length }, (_, at) => at);
const sum = (values) => values.reduce((total, each) => total + each, 0);

// The least and the most of the values that are numbers; undefined if there are none.
function extent(values) {
  let least, most;
  for (const each of values) {
    if (!(least <= each)) least = each >= each ? each : least;
    if (!(most >= each)) most = each >= each ? each : most;
  }
  return [least, most];
}
const mostOf = (values) => extent(values)[1];

function indexOfMost(values) {
  let best = 0;
  for (let at = 1; at < values.length; at++) if (values[at] > values[best]) best = at;
  return best;
}

// The place of the first value above one, among ascending values from `low` up to `high`.
function firstAbove(values, value, low = 0, high = values.length) {
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// ---- numbers as people read them

const trimmed = (text) => text.replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "");
const signed = (value, text) => (value < 0 ? `−${text}` : text);
const digits = (value) => trimmed(value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2));

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

// Four digits: 0.1235, 1.235e-7, 12.35k, 1M.
function plain(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size < 1e4) return signed(value, trimmed(size.toPrecision(4)));
  const [mantissa, exponent] = size.toExponential(3).split("e").map(Number);  // rounded first: 999,950 is 1M, not 1000k
  const thousands = Math.min(Math.floor(exponent / 3), 8);
  return signed(value, trimmed((mantissa * 10 ** (exponent - 3 * thousands)).toFixed(3)) + "kMGTPEZY"[thousands - 1]);
}

function integer(value) {
  const rounded = Math.round(Math.abs(value));
  return signed(rounded && value, String(rounded));
}

// ---- colours

const probe = document.createElement("canvas").getContext("2d");

function rgb(colour) {
  probe.fillStyle = colour;  // reads back as #rrggbb
  return [1, 3, 5].map((at) => parseInt(probe.fillStyle.slice(at, at + 2), 16));
}

// The text colour that is readable on a colour: black where lightness (CIE L*) is above 50, which is a luminance of 0.184.
function inkOn(colour) {
  const [red, green, blue] = rgb(colour).map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.184 ? "#111" : "#fff";
}

// ---- scales

// Maps the values of `domain` to the pixels of `range`. A domain of one value is in the middle.
function linear(domain, range) {
  const [from, to] = domain, [start, end] = range;
  const scale = (value) => {
    const share = from === to ? 0.5 : (value - from) / (to - from);
    return start * (1 - share) + end * share;
  };
  const invert = (pixel) => {
    const share = start === end ? 0.5 : (pixel - start) / (end - start);
    return from * (1 - share) + to * share;
  };
  return Object.assign(scale, { domain, range, invert });
}

// Multiples of 1, 2 or 5 times a power of ten, about `wanted` of them.
function ticksOf([from, to], wanted) {
  if (from === to) return [from];
  const rough = (to - from) / wanted, power = Math.floor(Math.log10(rough)), rest = rough / 10 ** power;
  const factor = rest >= Math.sqrt(50) ? 10 : rest >= Math.sqrt(10) ? 5 : rest >= Math.sqrt(2) ? 2 : 1;
  // A step below one is kept as its inverse: 3 / 10 is the number nearest to 0.3, and 3 * 0.1 is not.
  const isFine = power < 0, step = isFine ? 10 ** -power / factor : factor * 10 ** power;
  const value = (nth) => (isFine ? nth / step : nth * step), nth = (each) => Math.round(isFine ? each * step : each / step);
  let first = nth(from), last = nth(to);
  if (value(first) < from) first++;
  if (value(last) > to) last--;
  return last >= first ? upTo(last - first + 1).map((at) => value(first + at)) : [];
}

// ---- elements

const SVG = "http://www.w3.org/2000/svg";

function add(parent, name, attributes = {}, text = "") {
  const element = document.createElementNS(name === "svg" ? SVG : parent.namespaceURI, name);
  set(element, attributes);
  element.textContent = text;
  return parent.appendChild(element);
}

function set(element, attributes) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
}

// Where an event is in an element's own units.
function xyIn(svg, event) {
  const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  return [x, y];
}

const SIDES = {
  top: { mark: { y2: -6 }, word: { y: -9, dy: "0em" }, anchor: "middle" },
  bottom: { mark: { y2: 6 }, word: { y: 9, dy: "0.71em" }, anchor: "middle" },
  left: { mark: { x2: -6 }, word: { x: -9, dy: "0.32em" }, anchor: "end" },
};

// Draws the axis of a scale at x, y: a line with a mark and a word at each value.
function axis(svg, side, [x, y], scale, values, format) {
  const { mark, word, anchor } = SIDES[side], half = devicePixelRatio > 1 ? 0 : 0.5;  // thin lines are sharp
  const group = add(svg, "g", { transform: `translate(${x},${y})`, "text-anchor": anchor });
  const [start, end] = scale.range.map((each) => each + half);
  add(group, "path", { class: "domain", d: side === "left" ? `M-6,${start}H${half}V${end}H-6` : `M${start},${half}H${end}` });
  for (const each of values) {
    const at = scale(each) + half;
    const tick = add(group, "g", { class: "tick", transform: side === "left" ? `translate(0,${at})` : `translate(${at},0)` });
    add(tick, "line", mark);
    add(tick, "text", word, format(each));
  }
}

const pair = ([x, y]) => `${Math.round(1e3 * x) / 1e3},${Math.round(1e3 * y) / 1e3}`;  // toFixed is slower
const pathOf = (points) => (points.length ? `M${points.map(pair).join("L")}` : "");

// An area of steps. Each step, an x with its low and high y, lasts until the next one's x.
function areaOf(points) {
  const upper = points.flatMap(([x, , high], at) => (at ? [[x, points[at - 1][2]], [x, high]] : [[x, high]]));
  const lower = points.flatMap(([x, low], at) => (at ? [[x, points[at - 1][1]], [x, low]] : [[x, low]]));
  return points.length ? `${pathOf([...upper, ...lower.reverse()])}Z` : "";
}

// ---- zoom

// What is seen of content: its pixel p is at k * p + x.
class View {
  constructor(k = 1, x = 0) { Object.assign(this, { k, x }); }
  invert(pixel) { return (pixel - this.x) / this.k; }
  of(scale) { return linear(scale.range.map((each) => scale.invert(this.invert(each))), scale.range); }
}

/* Zooms and moves along x: a wheel with Ctrl or Meta, a drag, two fingers, a double click or tap (with Shift outwards).
   `span` gives the pixels that the whole content fills; what is outside is never seen. The view belongs to the caller,
   who may show it in other places too: `get` gives it, `show` takes the next one. */
class Zoom {
  static MOST = 1e6;
  static GLIDE = 250;  // milliseconds of the way to a double click's view
  static TURN = 150;  // a wheel that rests as long has ended its turn
  static TAPS = 500;  // between the two taps of a double tap
  static NEAR = 10;  // pixels between them

  constructor(surface, span, get, show) {
    Object.assign(this, { surface, span, get, show, fingers: new Map(), grip: null, turn: null, tap: null, hasMoved: false });
    const listen = (name, react) => surface.addEventListener(name, react, { passive: false });
    listen("pointerdown", (event) => this.press(event));
    listen("pointermove", (event) => this.drag(event));
    for (const name of ["pointerup", "pointercancel"]) listen(name, (event) => this.release(event));
    listen("wheel", (event) => this.wheel(event));
    listen("dblclick", (event) => this.double(event));
    // The page may be scrolled by one finger (touch-action: pan-y), and not while two of them zoom.
    listen("touchmove", (event) => { if (event.touches.length > 1) event.preventDefault(); });
  }

  xy(event) {
    const { left, top } = this.surface.getBoundingClientRect();
    return [event.clientX - left - this.surface.clientLeft, event.clientY - top - this.surface.clientTop];
  }

  // The view at a scale that has the content's pixel `under` at pixel `at`, as far as the limits let it.
  held(k, at, under) {
    const [left, right] = this.span(), scale = clamp(k, 1, Zoom.MOST);
    return new View(scale, clamp(at - scale * under, right * (1 - scale), left * (1 - scale)));
  }

  go(next) {
    cancelAnimationFrame(this.frame);
    this.show(next);
  }

  by(pixels) { this.go(this.held(this.get().k, pixels, this.get().invert(0))); }

  times(factor, at) { this.go(this.held(this.get().k * factor, at, this.get().invert(at))); }

  // The scale changes by equal factors in equal times, slowly at both ends; what is at pixel `at` stays, or moves evenly.
  glide(next, at) {
    const from = this.get(), under = from.invert(at), way = next.invert(at) - under;
    let begun;
    const step = (now) => {
      begun ??= now;
      const time = (now - begun) / Zoom.GLIDE;
      if (time >= 1) return this.go(next);
      const share = time < 0.5 ? 4 * time ** 3 : 1 - 4 * (1 - time) ** 3, k = from.k * (next.k / from.k) ** share;
      this.show(new View(k, at - k * (under + share * way)));
      this.frame = requestAnimationFrame(step);
    };
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(step);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    const view = this.get(), [at] = this.xy(event), isNew = !this.turn || event.timeStamp - this.turn.time > Zoom.TURN;
    const pixel = [0.002, 0.05, 1][event.deltaMode];  // deltas are in pixels, lines or pages
    // Browsers give a trackpad's pinch as a wheel with Ctrl and small deltas.
    const k = clamp(view.k * 2 ** (-event.deltaY * pixel * (event.ctrlKey ? 10 : 1)), 1, Zoom.MOST);
    if (isNew && k === view.k) return;
    event.preventDefault();
    // Under a resting pointer the same place is held, also where a limit has moved it meanwhile.
    if (isNew || this.turn.at !== at) this.turn = { at, under: view.invert(at) };
    this.turn.time = event.timeStamp;
    this.go(this.held(k, at, this.turn.under));
  }

  press(event) {
    if (event.button) return;
    cancelAnimationFrame(this.frame);
    const xy = this.xy(event);
    const isSecond = this.tap && !this.tap.isSecond && event.timeStamp - this.tap.time < Zoom.TAPS;
    if (event.pointerType !== "touch" || this.fingers.size) this.tap = null;
    else this.tap = isSecond ? { ...this.tap, isSecond } : { xy, time: event.timeStamp };
    if (!this.fingers.size) this.hasMoved = false;
    this.surface.setPointerCapture(event.pointerId);
    this.fingers.set(event.pointerId, xy);
    this.hold();
  }

  // The middle of the fingers, or of the first two of them, and how far they are apart.
  reach() {
    const [[x, y], other] = this.fingers.values();
    return other ? { middle: (x + other[0]) / 2, apart: Math.hypot(x - other[0], y - other[1]) || 1 } : { middle: x };
  }

  // From now on, what is under the fingers stays under them.
  hold() {
    const { middle, apart } = this.reach(), view = this.get();
    this.grip = { under: view.invert(middle), apart, k: view.k };
  }

  drag(event) {
    const before = this.fingers.get(event.pointerId), xy = this.xy(event);
    if (!before) return;
    // A mouse that has moved is not clicked. Of a finger the browser knows better.
    if (event.pointerType === "mouse" && (xy[0] !== before[0] || xy[1] !== before[1])) this.hasMoved = true;
    this.fingers.set(event.pointerId, xy);
    const { middle, apart } = this.reach(), k = apart ? this.grip.k * apart / this.grip.apart : this.get().k;
    this.go(this.held(k, middle, this.grip.under));
  }

  release(event) {
    if (!this.fingers.delete(event.pointerId)) return;
    if (this.fingers.size) return this.hold();
    if (event.type === "pointercancel" || !this.tap?.isSecond) return;
    const [x, y] = this.xy(event), [firstX, firstY] = this.tap.xy;
    if (Math.hypot(x - firstX, y - firstY) < Zoom.NEAR) this.double(event);
  }

  double(event) {
    if (event.button) return;
    // Some browsers tell a double tap by a dblclick of its own.
    if (event.type === "dblclick" && this.tap?.isSecond && event.timeStamp - this.tap.time < 2 * Zoom.TAPS) return;
    event.preventDefault();
    const view = this.get(), [at] = this.xy(event);
    this.glide(this.held(view.k * (event.shiftKey ? 0.5 : 2), at, view.invert(at)), at);
  }
}
