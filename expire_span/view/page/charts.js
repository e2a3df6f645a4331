// Line charts as SVG. However long the trace, a line has few points, so that it is drawn fast and the SVG can be downloaded unchanged.

const SVG = "http://www.w3.org/2000/svg";

function svgNode(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text != null) node.textContent = text;
  return node;
}

// Downsamples to at most `columns` points, each the mean of its stretch of steps: more points than pixels would not be seen.
function thin(values, size, columns) {
  const count = Math.min(size, columns), out = [];
  for (let c = 0; c < count; c++) {
    const low = Math.floor(c / count * size), high = Math.max(low + 1, Math.floor((c + 1) / count * size));
    let sum = 0, seen = 0;
    for (let i = low; i < high; i++) if (!Number.isNaN(values[i])) { sum += values[i]; seen++; }
    if (seen) out.push([(low + high - 1) / 2, sum / seen]);
  }
  return out;
}

// A round distance between ticks: 1, 2 or 5 times a power of ten.
function niceGap(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough);
}

// lines: { name, points: [[x, y]], colour, dashed }. The dashed line of a model that never forgets outgrows the others: the axis ends a
// little above these, and the line is labelled with its last value. `axis` names what is measured.
function drawChart(svg, lines, { size, cursor, format, name, axis }) {
  const wide = Math.max(svg.clientWidth, 260), high = 200, left = 52, right = 8, top = 24, bottom = 24;
  svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", name);
  const solid = lines.filter((line) => !line.dashed).flatMap((line) => line.points.map((p) => p[1]));
  const peak = Math.max(...solid, 1e-9), most = Math.max(...lines.flatMap((line) => line.points.map((p) => p[1])), 1e-9);
  const limit = Math.min(most, peak * 3) * 1.05, gap = niceGap(limit / 4.5);
  const x = (i) => left + i / Math.max(size - 1, 1) * (wide - left - right), y = (v) => high - bottom - v / limit * (high - top - bottom);
  const nodes = [svgNode("clipPath", { id: svg.id + "-clip" })];
  nodes[0].append(svgNode("rect", { x: left, y: top - 4, width: wide - left - right, height: high - top - bottom + 4 }));
  for (let value = 0; value <= limit; value += gap) {
    nodes.push(svgNode("line", { x1: left, x2: wide - right, y1: y(value), y2: y(value), stroke: "currentColor", "stroke-opacity": 0.15 }));
    nodes.push(svgNode("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", "font-size": 11, fill: "currentColor" }, format(value)));
  }
  nodes.push(svgNode("text", { x: left, y: high - 6, "font-size": 11, fill: "currentColor" }, "step 0"));
  nodes.push(svgNode("text", { x: wide - right, y: high - 6, "text-anchor": "end", "font-size": 11, fill: "currentColor" }, show(size - 1)));
  lines.forEach((line, n) => {
    const d = line.points.map((p, k) => `${k ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    const dash = line.dashed ? "5 4" : n >= LINES.length ? "2 2" : "none";
    nodes.push(svgNode("path", { d, fill: "none", stroke: line.colour, "stroke-width": 1.6, "stroke-dasharray": dash, "clip-path": `url(#${svg.id}-clip)` }));
    if (line.points.length === 1) nodes.push(svgNode("circle", { cx: x(line.points[0][0]), cy: y(line.points[0][1]), r: 3, fill: line.colour }));
    if (line.dashed && line.points.length > 1) nodes.push(nameDashed(line, { limit, x, wide, top, format }));
  });
  nodes.push(svgNode("text", { x: 2, y: 11, "font-size": 11, fill: "currentColor" }, lines.length > 2 ? `${axis}, layer` : axis));
  if (lines.length > 2) lines.filter((line) => !line.dashed).slice(0, 12).forEach((line, n) => {
    nodes.push(svgNode("text", { x: 130 + n * 18, y: 11, "font-size": 11, "font-weight": 600, fill: line.colour }, line.name));
  });
  const at = x(cursor);
  nodes.push(svgNode("line", { class: "es-at", x1: at, x2: at, y1: top - 4, y2: high - bottom, stroke: "currentColor", "stroke-opacity": 0.6 }));
  svg.replaceChildren(...nodes);
  svg.place = x;
}

// The name and last value of the dashed line, beside the place at which it leaves the chart.
function nameDashed(line, { limit, x, wide, top, format }) {
  const [at, value] = line.points[line.points.length - 1], leaves = x(Math.min(limit / value, 1) * at), room = leaves < wide / 2;
  const place = { x: leaves + (room ? 8 : -8), y: top + 8, "text-anchor": room ? "start" : "end" };
  return svgNode("text", { ...place, "font-size": 11, fill: "currentColor", "fill-opacity": 0.75 }, `${line.name}: ${format(value)}`);
}

function moveCursor(svg, cursor) {
  const line = svg.querySelector(".es-at");
  if (!line || !svg.place) return;
  line.setAttribute("x1", svg.place(cursor));
  line.setAttribute("x2", svg.place(cursor));
}

function drawCosts(trace, cursor) {
  const { layers, full_bytes: each } = trace.header, size = trace.size, columns = 400;
  const lives = trace.live.map((column, n) => ({ name: String(n + 1), points: thin(column.data, size, columns), colour: LINES[n % LINES.length] }));
  const never = { name: "never forgetting", points: size > 1 ? [[0, 1], [size - 1, size]] : [[0, 1]], colour: "currentColor", dashed: true };
  drawChart(find("live"), [...lives, never], { size, cursor, format: show, name: "memories alive in each layer over time", axis: "memories alive" });
  const total = new Float64Array(size);
  for (const column of trace.bytes) for (let i = 0; i < size; i++) total[i] += column.data[i];
  const full = { ...never, points: never.points.map(([x, y]) => [x, y * layers * each]) };
  const bytes = { name: "alive", points: thin(total, size, columns), colour: LINES[0] };
  drawChart(find("bytes"), [bytes, full], { size, cursor, format: showBytes, name: "bytes alive over time", axis: "bytes of living memories" });
  const bits = thin(trace.bits.data, size, 100);
  find("bits-box").hidden = !bits.length || trace.header.vocabulary === "symbols";
  if (bits.length) drawChart(find("bits"), [{ name: "bits", points: bits, colour: LINES[4] }], { size, cursor, format: show, name: "bits of each token", axis: "bits per token" });
}
