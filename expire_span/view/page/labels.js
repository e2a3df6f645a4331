// Text on the timeline: the axis of the rows, and the names of the longest-lived memories.

const LABEL = 11;  // pixels
const MOST_LABELS = 24, LONGEST_LABEL = 22, LOOKED_AT = 400;

// Memories sorted by lifetime, longest first; an empty list if there are too many to label.
function rankLives(death) {
  if (death.length > MOST_WORDS) return [];
  return Array.from(death.keys()).filter((i) => death[i] > i).sort((a, b) => death[b] - b - (death[a] - a) || a - b);
}

function shorten(text) {
  const letters = Array.from(escapeControls(text).replace(/\s+/g, " ").trim());
  return letters.length > LONGEST_LABEL ? letters.slice(0, LONGEST_LABEL - 1).join("") + "…" : letters.join("");
}

// Tick labels of the rows, and the name of the axis: { x, y, text } each.
function rowTicks({ area, high }, rowName) {
  const rows = area[3] - area[2], gap = niceStep(rows / Math.max(high / 70, 1)), out = [];
  for (let row = Math.ceil(area[2] / gap) * gap; row < area[3]; row += gap) {
    const y = (row - area[2]) / rows * high;
    if (row > 0 && y > 2 * LABEL && y < high - 2.2 * LABEL) out.push({ x: 8, y, text: show(row), tick: true });
  }
  return [...out, { x: 8, y: high - LABEL, text: rowName + " ↓" }];
}

// Labels of the longest-lived memories, as many as fit without overlap: { x, y, text }; `inside` is the text colour of a label that fits
// within its line.
function placeLabels(timeline, context) {
  const { area, wide, high } = timeline.shown, scaleX = wide / (area[1] - area[0]), scaleY = high / (area[3] - area[2]);
  context.font = `${LABEL}px system-ui, sans-serif`;
  const boxOf = ({ x, y, text }) => [x - 4, y - LABEL / 2 - 1, x + context.measureText(text).width + 4, y + LABEL / 2 + 1];
  const ticks = rowTicks(timeline.shown, timeline.rowName), taken = ticks.map(boxOf), out = [], named = [];
  let looked = 0;
  for (const i of timeline.ranked) {
    const death = Math.min(timeline.death[i], timeline.end);
    if (i >= area[1] || death <= area[0]) continue;
    if (looked++ > LOOKED_AT || out.length >= MOST_LABELS) break;
    const label = { x: Math.max((i - area[0]) * scaleX, 0) + 4, y: Math.max((timeline.rows[i] + 0.5 - area[2]) * scaleY, LABEL / 2 + 2), text: shorten(timeline.nameOf(i)) }, box = boxOf(label);
    if (!label.text || (timeline.layout === "words" && !/[\p{L}\p{N}]/u.test(label.text)) || box[1] < 0 || box[3] > high || box[2] > Math.min((death - area[0]) * scaleX, wide)) continue;
    if (taken.some(([a, b, c, d]) => box[0] < c && a < box[2] && box[1] < d && b < box[3])) continue;
    taken.push(box);
    const alive = i <= timeline.cursor && timeline.cursor < timeline.death[i];
    if (0.84 * scaleY > LABEL) label.inside = inkOn(over(colourAt(0.12 + 0.88 * timeline.lives[4 * i + 3]), alive ? 1 : 0.6));
    out.push(label);
    named.push(i);
  }
  timeline.named = named;
  return [...ticks, ...out];
}

function drawLabels(timeline, context) {
  const labels = timeline.labels = placeLabels(timeline, context);
  context.save();
  Object.assign(context, { textBaseline: "middle", lineJoin: "round", lineWidth: 3.5, strokeStyle: ink("card"), globalAlpha: 0.9 });
  for (const { x, y, text, inside } of labels) if (!inside) context.strokeText(text, x, y);
  context.globalAlpha = 1;
  for (const { x, y, text, tick, inside } of labels) {
    context.fillStyle = inside || ink("ink");
    context.fillText(text, x, y);
    if (tick) context.fillRect(0, y, 5, 1);
  }
  context.restore();
}

// The same labels, and the axis of steps, for a saved SVG.
function labelsSvg(timeline) {
  const { area, wide, high } = timeline.shown, middle = 'dominant-baseline="central"', size = `font-size="${LABEL}"`, font = `${size} fill="${ink("ink")}"`;
  const halo = `paint-order="stroke" stroke="${ink("card")}" stroke-width="3.5" stroke-linejoin="round"`;
  const words = placeLabels(timeline, timeline.ink.getContext("2d")).map(({ x, y, text, inside }) => `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" ${inside ? `${size} fill="${inside}"` : `${font} ${halo}`} ${middle}>${escapeText(text)}</text>`);
  const steps = timeline.steps(area, wide).map(({ x, text }) => `<rect x="${x.toFixed(1)}" y="${high}" width="1" height="5" fill="${ink("soft")}"/>` +
    (text ? `<text x="${(x + 3).toFixed(1)}" y="${high + 12}" ${font}>${text}</text>` : ""));
  return [...words, ...steps, `<text x="${wide - 4}" y="${high + 12}" text-anchor="end" ${font}>step →</text>`].join("");
}
