// Pictures as PNG and SVG, the whole view as one file, and a link that opens it again.

const PAINTED = ["strips", "hidden"];

function saveBlob(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function svgText(width, height, body) {
  const back = ink("card"), font = "system-ui, sans-serif";
  return `<svg xmlns="${SVG}" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="${font}" color="${ink("ink")}">` +
    `<rect width="100%" height="100%" fill="${back}"/>${body}</svg>`;
}

function escapeText(text) { return text.replace(/[&<>"\u0000-\u0008\u000b-\u001f\ufffe\uffff]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c] || "\ufffd"); }

function chartSvg(name) {
  const svg = find(name), [, , wide, high] = svg.getAttribute("viewBox").split(" ").map(Number);
  return svgText(wide, high, svg.innerHTML);
}

function timelineSvg(timeline) {
  const { first, last, area, wide, high } = timeline.shown, parts = [];
  if (last - first > MOST_QUADS) throw new Error(`an SVG of ${last - first} lines would be too large, zoom in below ${MOST_QUADS} first or save a PNG`);
  const scaleX = wide / (area[1] - area[0]), scaleY = high / (area[3] - area[2]);
  for (const bar of timeline.bars(first, last)) {
    const x = Math.max((bar.birth - area[0]) * scaleX, 0), end = Math.min((bar.end - area[0]) * scaleX, wide);
    const y = (bar.row - area[2]) * scaleY, tall = Math.max(0.84 * scaleY, 0.5), fade = Math.max(Math.min((bar.death - timeline.ramp - area[0]) * scaleX, end), x);
    const rect = (from, to, opacity) => to > from ? `<rect x="${from.toFixed(1)}" y="${y.toFixed(2)}" width="${(to - from).toFixed(1)}" height="${tall.toFixed(2)}" fill="${timeline.table().names[bar.shade]}" fill-opacity="${opacity}"/>` : "";
    parts.push(rect(x, fade, 1) + rect(fade, end, 0.5));
  }
  return svgText(Math.round(wide), Math.round(high) + AXIS, parts.join("") + labelsSvg(timeline));
}

function tokensSvg() {
  const box = find("tokens"), frame = box.getBoundingClientRect(), parts = [];
  const size = 14;
  for (const node of box.children) {
    for (const place of node.getClientRects()) {
      if (place.width < 1) continue;
      const x = place.left - frame.left, y = place.top - frame.top + box.scrollTop;
      parts.push(`<rect x="${x.toFixed(1)}" y="${y.toFixed(1)}" width="${place.width.toFixed(1)}" height="${place.height.toFixed(1)}" fill="${node.style.backgroundColor || "none"}"/>`);
      parts.push(`<text x="${x.toFixed(1)}" y="${(y + place.height - 5).toFixed(1)}" font-family="monospace" font-size="${size}" fill="${node.style.color || ink("ink")}" xml:space="preserve">${escapeText(node.textContent.replace(/\n/g, ""))}</text>`);
    }
  }
  return svgText(Math.round(frame.width), Math.max(Math.round(box.scrollHeight), 20), parts.join(""));
}

// What exists only as pixels is embedded in the SVG as an image.
function canvasSvg(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  return svgText(Math.round(width), Math.round(height), `<image width="${width}" height="${height}" preserveAspectRatio="none" href=${JSON.stringify(canvas.toDataURL())}/>`);
}

function pictureSvg(name, timeline) {
  if (PAINTED.includes(name)) return canvasSvg(find(name));
  if (name === "timeline") return timelineSvg(timeline);
  return name === "tokens" ? tokensSvg() : chartSvg(name);
}

async function svgToPng(text) {
  const image = new Image();
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = 2 * image.width; canvas.height = 2 * image.height;
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done));
}

function timelinePng(timeline) {
  timeline.draw();
  const canvas = document.createElement("canvas");
  canvas.width = timeline.ink.width; canvas.height = timeline.ink.height;
  const context = canvas.getContext("2d");
  context.fillStyle = ink("card");
  context.fillRect(0, 0, canvas.width, canvas.height);
  if (timeline.quads.gl) context.drawImage(timeline.glCanvas, 0, 0);
  context.drawImage(timeline.ink, 0, 0);
  return new Promise((done) => canvas.toBlob(done));
}

async function savePicture(name, as, timeline) {
  const blob = as === "svg" ? new Blob([pictureSvg(name, timeline)], { type: "image/svg+xml" })
    : name === "timeline" ? await timelinePng(timeline) : await svgToPng(pictureSvg(name, timeline));
  saveBlob(blob, `expire-span-${name}.${as}`);
}

// Saves the view as one HTML file: this page's own markup, style and script with the trace inside, and no server to ask. `after` is the second
// trace of a comparison.
async function savePage(pristine, trace, after, view) {
  const packed = await packLines(trace.lines), changed = after ? await packLines(after.lines) : "", title = escapeText(trace.header.name);
  const rules = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:";
  const tag = (name, attributes, text) => `<${name}${attributes}>${text}</${name}>`;
  const page = `<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">` +
    `<meta http-equiv="Content-Security-Policy" content="${rules}"><title>${title} · Expire-Span</title>` +
    tag("style", ' id="es-style"', find("style").textContent) + `</head><body>${pristine}` +
    tag("script", ' type="text/plain" id="es-trace"', packed) + tag("script", ' type="text/plain" id="es-trace-after"', changed) + tag("script", ` id="es-script" data-live="" data-view="${escapeText(view)}"`, find("script").textContent) + `</body></html>`;
  saveBlob(new Blob([page], { type: "text/html" }), `${trace.header.name.replace(/[^\w.-]+/g, "_") || "view"}.html`);
}

function toLink(values) {
  const text = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) if (value !== "" && value != null) text.set(key, value);
  return "#" + text.toString();
}

// The settings in the address; a saved page has those of the view that it was saved from.
function fromLink() { return Object.fromEntries(new URLSearchParams((location.hash || find("script").dataset.view || "").slice(1))); }
