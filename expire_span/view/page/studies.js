// Recurrent memory made by hand, with sliders: the counter of entrances, the tanh units that detect them, the leaky counter.
// The same formulas as in expire_span/study, so that what is drawn here is what is measured there.

const SERIES = 60;

// A series around 0.5 whose neighbouring values are correlated, determined by `seed`.
function makeSeries(seed, length = SERIES) {
  let state = (seed * 2654435761 + 1) >>> 0;
  const draw = () => { state = (Math.imul(state, 1664525) + 1013904223) >>> 0; return state / 2 ** 32; };
  const noise = () => draw() + draw() + draw() + draw() - 2;
  const raw = Array.from({ length: length + 2 }, noise);
  return Array.from({ length }, (_, i) => 0.5 + 1.5 * (raw[i] + raw[i + 1] + raw[i + 2]) / Math.sqrt(3));
}

function runCounter(values) {
  let inside = 0, count = 0;
  return values.map((x) => { const now = x >= 0 && x <= 1 ? 1 : 0; count += now && !inside ? 1 : 0; inside = now; return [inside, count]; });
}

function firstLayer(x, steep) { return [Math.tanh(steep * x), Math.tanh(-steep * x + steep)]; }
function detect(x, steep) { const [left, right] = firstLayer(x, steep); return Math.tanh(left + right); }

function runLeaky(inside, w1, w2) {
  let h = 0;
  return inside.map((g) => { h = Math.tanh(w1 * h + w2 * g); return h; });
}

function weightsOf(ratio) { return [ratio / (1 + ratio), 1 / (1 + ratio)]; }

// Curves over any range: { name, points: [[x, y]], colour }. `band` shades a range of x or y.
function drawCurves(svg, curves, { xs, ys, band, name, along }) {
  const wide = Math.max(svg.clientWidth, 260), high = 200, left = 40, right = 10, top = 18, bottom = 22;
  svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", name);
  const x = (v) => left + (v - xs[0]) / (xs[1] - xs[0]) * (wide - left - right), y = (v) => high - bottom - (v - ys[0]) / (ys[1] - ys[0]) * (high - top - bottom);
  const text = (at, words, more) => svgNode("text", { y: at, "font-size": 11, fill: "currentColor", ...more }, words), nodes = [];
  if (band) nodes.push(svgNode("rect", { x: band.x ? x(band.x[0]) : left, width: band.x ? x(band.x[1]) - x(band.x[0]) : wide - left - right, y: band.y ? y(band.y[1]) : top, height: band.y ? y(band.y[0]) - y(band.y[1]) : high - top - bottom, fill: LINES[1], "fill-opacity": 0.18 }));
  for (const value of [ys[0], (ys[0] + ys[1]) / 2, ys[1]]) {
    nodes.push(svgNode("line", { x1: left, x2: wide - right, y1: y(value), y2: y(value), stroke: "currentColor", "stroke-opacity": 0.15 }));
    nodes.push(text(y(value) + 4, show(value), { x: left - 5, "text-anchor": "end" }));
  }
  nodes.push(text(high - 6, show(xs[0]), { x: left }), text(high - 6, show(xs[1]), { x: wide - right, "text-anchor": "end" }), text(high - 6, along, { x: (left + wide - right) / 2, "text-anchor": "middle" }));
  let at = left;
  for (const curve of curves) {
    const d = curve.points.map(([a, b], k) => `${k ? "L" : "M"}${x(a).toFixed(1)} ${y(Math.min(Math.max(b, ys[0]), ys[1])).toFixed(1)}`).join("");
    nodes.push(svgNode("path", { d, fill: "none", stroke: curve.colour, "stroke-width": 1.8 }));
    nodes.push(text(11, curve.name, { x: at, fill: curve.colour, "font-weight": 600 }));
    at += 7 * curve.name.length + 14;
  }
  svg.replaceChildren(...nodes);
}

// The counter's state as two rows of cells: dark where the series is inside the range, and darker the higher the count.
function drawCounterRows(values, rows) {
  const svg = find("study-counter-rows"), wide = Math.max(svg.clientWidth, 260), each = (wide - 50) / values.length, nodes = [], most = Math.max(rows[rows.length - 1][1], 1);
  svg.setAttribute("viewBox", `0 0 ${wide} 46`);
  rows.forEach(([inside, count], i) => {
    const box = { x: (40 + i * each).toFixed(1), width: Math.max(each - 0.5, 0.5).toFixed(1), height: 18 };
    nodes.push(svgNode("rect", { ...box, y: 2, fill: css(colourAt(inside)) }), svgNode("rect", { ...box, y: 24, fill: css(colourAt(count / most)) }));
  });
  ["inside", "count"].forEach((name, n) => nodes.push(svgNode("text", { x: 36, y: 15 + 22 * n, "text-anchor": "end", "font-size": 11, fill: "currentColor" }, name)));
  svg.replaceChildren(...nodes);
}

function drawStudies() {
  if (!find("studies").open) return;
  const number = (name) => Number(find("study-" + name).value), values = makeSeries(number("seed")), rows = runCounter(values);
  const steep = number("steep"), ratio = 2 ** number("ratio"), [w1, w2] = weightsOf(ratio);
  find("study-steep-name").textContent = show(steep);
  find("study-ratio-name").textContent = `w1 ${show(w1)}, w2 ${show(w2)}`;
  const index = (list) => list.map((v, i) => [i, v]);
  drawCurves(find("study-series"), [{ name: "series", points: index(values), colour: LINES[0] }], { xs: [0, SERIES - 1], ys: [-3, 4], band: { y: [0, 1] }, name: "a series and the range it enters", along: "step" });
  drawCounterRows(values, rows);
  find("study-count").textContent = `It has come into [0, 1] ${rows[rows.length - 1][1]} times: the count changes exactly where "inside" goes from 0 to 1.`;
  const grid = Array.from({ length: 201 }, (_, n) => -1 + 3 * n / 200), curve = (name, of, colour) => ({ name, points: grid.map((x) => [x, of(x)]), colour });
  drawCurves(find("study-stack"), [curve("tanh(a x)", (x) => firstLayer(x, steep)[0], LINES[5]), curve("tanh(-a x + a)", (x) => firstLayer(x, steep)[1], LINES[3]), curve("tanh(sum)", (x) => detect(x, steep), LINES[0])],
    { xs: [-1, 2], ys: [-1, 1], band: { x: [0, 1] }, name: "two detectors and their sum", along: "input x" });
  const leaky = runLeaky(values.map((x) => detect(x, steep)), w1, w2);
  drawCurves(find("study-leaky"), [{ name: "h", points: index(leaky), colour: LINES[4] }, { name: "inside", points: index(rows.map(([inside]) => inside)), colour: LINES[2] }], { xs: [0, SERIES - 1], ys: [0, 1], name: "the leaky counter", along: "step" });
  const one = runLeaky([Math.tanh(2), ...Array(10).fill(0)], w1, w2);
  find("study-leak").textContent = `One step inside adds ${show(one[0])}; ten quiet steps later ${(100 * one[10] / one[0]).toFixed(0)}% of it is left. What keeps more notices less.`;
}

// Splits a unit's values into stretches over which it varies by at most `eps` of its whole range; returns their lengths, in order.
function stretchLengths(values, eps = 0.1) {
  const limit = eps * (Math.max(...values) - Math.min(...values)), lengths = [];
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value); high = Math.max(high, value);
    if (!lengths.length || high - low > limit) { lengths.push(0); low = high = value; }
    lengths[lengths.length - 1]++;
  }
  return lengths;
}

// Stretches of `HELD` steps or more, longest first: { unit, from, to, value }.
const HELD = 5;

function findStretches(states) {
  const out = [], units = states.length ? states[0].length : 0;
  for (let unit = 0; unit < units; unit++) {
    let from = 0;
    for (const length of stretchLengths(states.map((row) => row[unit]))) {
      if (length >= HELD) out.push({ unit, from, to: from + length - 1, value: states[from][unit] });
      from += length;
    }
  }
  return out.sort((a, b) => (b.to - b.from) - (a.to - a.from));
}
