// Tokens as text coloured by span, a window of them at a time, and one strip of colour for each layer.

const WINDOW = 3000;
const STRIP = 14;

function paintToken(node, share) {
  const colour = colourAt(share);
  node.style.backgroundColor = css(colour);
  node.style.color = inkOn(colour);
}

// Fills the box with the tokens of a window, coloured by span. Elements that it already holds under the same key are kept.
function fillTokens(box, trace, span, range, from, to, { changed, worse, key } = {}) {
  const same = key && box.trace === trace && box.key === key && box.to <= to, kept = same ? countSettled(box) : 0;
  if (same && box.to === to) return;
  const cells = cellsOf(trace, kept ? box.cells[kept - 1].end : from, to), nodes = cells.map((cell) => {
    let widest = -Infinity;
    for (let i = cell.start; i < cell.end; i++) widest = Math.max(widest, span ? span[i] : 0);
    const text = escapeControls(cell.text).replace(/\n/g, "⏎\n");
    const node = element("span", text);
    node.dataset.i = cell.start;
    node.dataset.end = cell.end;
    if (span) paintToken(node, shareOf(widest, range));
    if (changed && changed(cell.start)) node.classList.add("es-changed");
    if (worse && worse(cell.start)) node.classList.add("es-worse");
    return node;
  });
  box.classList.toggle("es-words", !["bytes", "pieces"].includes(trace.header.vocabulary));
  if (kept) {
    for (const node of box.nodes.splice(kept)) node.remove();
    box.append(...nodes);
  } else box.replaceChildren(...nodes);
  const marks = new Uint8Array(kept + cells.length);
  if (kept) marks.set(box.marks.subarray(0, kept));
  Object.assign(box, { trace, key, to, marks, cells: kept ? [...box.cells.slice(0, kept), ...cells] : cells, nodes: kept ? [...box.nodes, ...nodes] : nodes });
}

// Number of cells that cannot change when more tokens arrive: those before the first byte of a character whose other bytes are yet to come.
// A character has at most four bytes, so only the last three can be such a byte.
function countSettled(box) {
  let kept = box.cells.length;
  for (let n = kept - 1; n >= 0 && box.cells[n].start + 4 > box.to; n--) if (box.cells[n].start + charBytes(box.trace, box.cells[n].start) > box.to) kept = n;
  return kept;
}

// Marks the cursor's token and underlines the tokens that are alive at it. Only elements whose mark changes are touched.
function markTokens(box, death, cursor, follow = true) {
  box.cells.forEach((cell, n) => {
    let mark = cell.start <= cursor && cursor < cell.end ? 2 : 0;
    for (let k = cell.start; death && k < cell.end; k++) if (k <= cursor && cursor < death[k]) mark |= 1;
    if (mark === box.marks[n]) return;
    box.marks[n] = mark;
    box.nodes[n].className = (mark & 1 ? "es-alive " : "") + (mark & 2 ? "es-cursor" : "");
    if (mark & 2 && follow) keepInView(box, box.nodes[n]);
  });
}

// Scrolls the box, never the page, by whole lines.
function keepInView(box, node) {
  const frame = box.getBoundingClientRect(), place = node.getBoundingClientRect();
  if (place.top >= frame.top && place.bottom <= frame.bottom) return;
  const line = parseFloat(getComputedStyle(box).lineHeight);
  box.scrollTop = Math.round((box.scrollTop + place.top - frame.top - box.clientHeight / 2) / line) * line;
}

function drawStrips(canvas, trace, ranges, from, to, cursor, chosen) {
  const { layers } = trace.header, { ratio, wide } = fitCanvas(canvas, layers * (STRIP + 3) + 2);
  const context = canvas.getContext("2d"), key = [trace.revision, from, to, canvas.width, dark, trace.header.name].join();
  if (canvas.key !== key) paintStrips(canvas, trace, ranges, from, to, ratio);
  canvas.key = key;
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.drawImage(canvas.painted, 0, 0);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = "11px system-ui, sans-serif";
  for (let layer = 0; layer < layers; layer++) {
    context.fillStyle = ink(layer === chosen ? "accent" : "soft");
    context.fillText(String(layer + 1), 1, layer * (STRIP + 3) + 11);
  }
  context.fillStyle = ink("accent");
  context.fillRect(MARGIN + (cursor + 0.5 - from) / Math.max(to - from, 1) * (wide - MARGIN) - 1, 0, 2, layers * (STRIP + 3));
}

// The strips without the cursor, kept until the trace or the window changes.
function paintStrips(canvas, trace, ranges, from, to, ratio) {
  canvas.painted = document.createElement("canvas");
  canvas.painted.width = canvas.width; canvas.painted.height = canvas.height;
  const { layers, heads } = trace.header, context = canvas.painted.getContext("2d");
  const count = Math.max(to - from, 1), columns = Math.max(Math.floor(canvas.width - MARGIN * ratio), 1);
  const pixels = context.createImageData(columns, 1);
  for (let layer = 0; layer < layers; layer++) {
    for (let x = 0; x < columns; x++) {
      const low = from + Math.floor(x / columns * count), high = Math.max(low + 1, from + Math.floor((x + 1) / columns * count));
      let widest = 0;
      for (let i = low; i < high && i < trace.size; i++) for (let h = 0; h < heads; h++) widest = Math.max(widest, trace.spans[layer * heads + h].data[i]);
      pixels.data.set([...colourAt(shareOf(widest, ranges[layer])), 255], 4 * x);
    }
    const top = Math.round(layer * (STRIP + 3) * ratio);
    for (let y = 0; y < STRIP * ratio; y++) context.putImageData(pixels, MARGIN * ratio, top + y);
  }
}

// Blue below zero, orange above; with `still`, only the stretches over which a unit holds its value.
function drawHidden(canvas, trace, layer, from, to, still, cursor) {
  const states = [];
  for (let i = from; i < to; i++) states.push(trace.step(i).hidden[layer]);
  const units = states.length ? states[0].length : 1, columns = Math.max(states.length, 1);
  fitCanvas(canvas, Math.max(120, Math.min(6 * units, 320)));
  const small = document.createElement("canvas");
  small.width = columns; small.height = units;
  const context = small.getContext("2d"), pixels = context.createImageData(columns, units);
  const held = still && new Set(findStretches(states).flatMap(({ unit, from: a, to: b }) => Array.from({ length: b - a + 1 }, (_, n) => unit * columns + a + n)));
  states.forEach((state, x) => state.forEach((value, unit) => {
    const colour = value < 0 ? [0, 114, 178] : [230, 159, 0], at = unit * columns + x, shown = !held || held.has(at);
    pixels.data.set([...colour, shown ? Math.round(255 * Math.min(Math.abs(value), 1)) : 0], 4 * at);
  }));
  context.putImageData(pixels, 0, 0);
  const out = canvas.getContext("2d");
  out.imageSmoothingEnabled = false;
  out.clearRect(0, 0, canvas.width, canvas.height);
  out.drawImage(small, 0, 0, canvas.width, canvas.height);
  out.fillStyle = ink("accent");
  out.fillRect((cursor + 0.5 - from) / columns * canvas.width - 1, 0, 2, canvas.height);
}
