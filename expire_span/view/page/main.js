// Puts the parts together: what is chosen, what is drawn when, and what keys and buttons do.

const root = find("view"), script = find("script"), pristine = root.outerHTML;
const live = script.dataset.live === "yes", LONGEST_LINK = 2000, SETTLED = 120;
const state = { trace: null, layer: -1, head: -1, cursor: 0, layout: "packed", text: null, limit: null, page: 0 };
const asked = fromLink();
const timeline = new Timeline(find("stage"), find("gl"), find("ink"), asked.gl);
let choice = { span: null, death: null }, range = [0, 1], ranges = [], writing = null, info = {}, waiting = 0, busy = null;

function say(message, lasting) {
  find("status").textContent = message;
  find("status").hidden = !message;
  clearTimeout(say.timer);
  if (message && !lasting) say.timer = setTimeout(() => say(""), 6000);
}

// What has to be drawn anew, in order: everything, the text, the marks of the cursor, or only the window of time.
const LEVELS = ["draw", "marks", "tokens", "all"];

function soon(what = "draw") {
  soon.wanted = Math.max(soon.wanted || 0, LEVELS.indexOf(what));
  if (!waiting) waiting = requestAnimationFrame(() => { waiting = 0; const wanted = soon.wanted; soon.wanted = 0; redraw(wanted); });
}

function redraw(wanted) {
  const { trace } = state;
  if (!trace || !trace.size) return;
  if (wanted >= LEVELS.indexOf("all")) choose();
  if (wanted >= LEVELS.indexOf("tokens")) fillText();
  timeline.cursor = state.cursor;
  if (trace.hasSpans) timeline.draw();
  if (wanted >= LEVELS.indexOf("marks")) drawMarks();
  if (wanted >= LEVELS.indexOf("all")) drawCosts(trace, state.cursor);
  if (trace.hasSpans) drawStrips(find("strips"), trace, ranges, ...tokenWindow(), state.cursor, state.layer);
  if (trace.hasHidden) drawHidden(find("hidden"), trace, Math.max(state.layer, 0), ...tokenWindow(), find("still").checked);
}

function choose() {
  const { trace } = state, following = timeline.to >= timeline.end;
  if (trace.hasSpans) {
    choice = trace.choose(state.layer, state.head);
    range = rangeOf(choice.span);
    ranges = Array.from({ length: trace.header.layers }, (_, layer) => rangeOf(trace.choose(layer, -1).span));
    timeline.load(choice, state.layout, range, trace.header.ramp, trace.size);
    if (following || timeline.to <= timeline.from) timeline.move(timeline.from, trace.size);
    find("shortest").textContent = show(range[0]);
    find("longest").textContent = `${show(range[1])} steps`;
    find("rows").textContent = state.layout === "packed" ? `At most ${show(timeline.height)} memories are alive at once.` : "The oldest memory is at the top.";
  } else choice = { span: null, death: null };
  find("stage").hidden = find("strips").hidden = find("choice").hidden = !trace.hasSpans;
  find("hidden-box").hidden = !trace.hasHidden;
  find("scrub").max = trace.size - 1;
  if (state.cursor >= trace.size) goToEnd(trace);
}

function fillText() {
  const { trace } = state, [from, to] = tokenWindow();
  find("turn").hidden = trace.size <= WINDOW;
  find("window").textContent = `tokens ${show(from)} to ${show(to - 1)} of ${show(trace.size)}`;
  fillTokens(find("tokens"), trace, choice.span, range, from, to);
}

function tokenWindow() {
  const from = Math.min(state.page * WINDOW, Math.max(state.trace.size - 1, 0));
  return [from, Math.min(from + WINDOW, state.trace.size)];
}

function drawMarks() {
  find("scrub").value = state.cursor;
  drawSlowly();
}

function drawFacts() {
  const { trace, cursor } = state, step = trace.step(cursor), { layers } = trace.header;
  find("at").textContent = show(cursor);
  for (const name of ["live", "bytes", "bits"]) moveCursor(find(name), cursor);
  const rows = [["token", visible(step.text)]];
  if (step.bits != null) rows.push(["it cost", `${show(step.bits)} bits (probability ${show(2 ** -step.bits)})`]);
  if (step.answer) rows.push(["asked for", `${step.answer.text}, ${show(step.answer.bits)} bits`]);
  for (let layer = 0; layer < Math.min(layers, 12); layer++) {
    const spans = step.spans ? step.spans[layer].map(show).join(", ") : "";
    rows.push([`layer ${layer + 1}`, `${spans ? `span ${spans}, ` : ""}${show(step.live[layer])} alive, ${showBytes(step.bytes[layer])}`]);
  }
  if (layers > 12) rows.push(["…", `${layers - 12} more layers`]);
  find("facts").replaceChildren(...rows.map(([name, value]) => { const row = element("tr"); row.append(element("td", name), element("td", value)); return row; }));
  const next = cursor + 1 < trace.size ? trace.text[cursor + 1] : null;
  find("top").replaceChildren(...(step.top || []).map(([text, chance]) => {
    const row = element("div", null, "es-guess"), bar = element("i");
    bar.style.width = Math.round(100 * chance) + "%";
    row.append(element("code", visible(text) + (text === next ? " ✓" : "")), bar, element("span", (100 * chance).toFixed(1) + "%"));
    return row;
  }));
  find("image").hidden = !step.image;
  if (step.image) find("image").src = "data:image/png;base64," + step.image.replace(/[^A-Za-z0-9+/=]/g, "");
  find("alive").textContent = choice.death ? show(livingAt(cursor).length) : show(trace.live.reduce((sum, column) => sum + column.data[cursor], 0) / layers);
}

function livingAt(cursor) {
  const living = [];
  for (let i = timeline.firstAlive(cursor); i <= cursor; i++) if (choice.death[i] > cursor) living.push(i);
  return living;
}

// What many elements show follows a fast cursor a few times a second, the rarer the more it costs, and a resting one at once.
function drawSlowly() {
  const wait = (drawSlowly.last || 0) + Math.max(SETTLED, 5 * (drawSlowly.cost || 0)) - performance.now();
  clearTimeout(drawSlowly.timer);
  drawSlowly.timer = 0;
  if (wait > 0) { drawSlowly.timer = setTimeout(drawSlowly, wait); return; }
  drawSlowly.last = performance.now();
  markTokens(find("tokens"), choice.death, state.cursor);
  drawFacts();
  drawLiving();
  requestAnimationFrame(() => setTimeout(() => { drawSlowly.cost = Math.min(performance.now() - drawSlowly.last, 200); }));
}

function drawLiving() {
  const { trace, cursor } = state, living = choice.death ? livingAt(cursor) : [];
  living.sort((a, b) => choice.death[b] - choice.death[a] || a - b);
  find("living").replaceChildren(...living.slice(0, 60).map((i) =>
    chip(trace.text[i], show(choice.death[i] - cursor), () => goTo(i), colourAt(shareOf(choice.span[i], range)))));
  if (living.length > 60) find("living").append(element("span", `and ${show(living.length - 60)} more`, "es-soft"));
}

function goTo(step) {
  if (!state.trace) return;
  state.cursor = Math.min(Math.max(Math.round(step), 0), state.trace.size - 1);
  clearTimeout(goTo.timer);
  goTo.timer = 0;
  if (Math.floor(state.cursor / WINDOW) !== state.page) goTo.timer = setTimeout(turn, SETTLED);
  const wide = timeline.to - timeline.from;
  if (state.cursor < timeline.from || state.cursor >= timeline.to) timeline.move(state.cursor - wide / 2, state.cursor + wide / 2);
  soon("marks");
}

function goToEnd(trace) {
  state.cursor = Math.max(trace.size - 1, 0);
  state.page = Math.floor(state.cursor / WINDOW);
}

// The text follows the cursor once it rests: to fill it anew for every place passed by would hold up the rest.
function turn() {
  goTo.timer = 0;
  state.page = Math.floor(state.cursor / WINDOW);
  soon("tokens");
}

function setTrace(trace, keep) {
  state.trace = trace;
  const { header } = trace;
  find("name").textContent = header.name || "Expire-Span";
  find("about").textContent = `${header.about || ""} Memory: ${header.system}, ${header.layers} ${header.layers > 1 ? "layers" : "layer"}` +
    (header.max_span ? `, spans up to ${show(header.max_span)} steps, ramp ${show(header.ramp)}.` : ".");
  find("layer").max = header.layers;
  find("head-box").hidden = header.heads < 2;
  find("head-pick").replaceChildren(new Option("longest of all", "-1"), ...Array.from({ length: header.heads }, (_, n) => new Option(n + 1, n)));
  if (!keep) { goToEnd(trace); timeline.from = 0; timeline.to = 0; timeline.end = 0; find("verdict").hidden = true; }
  pickLayer(Math.min(state.layer, header.layers - 1));
  find("pictures").hidden = false;
}

function pickLayer(layer) {
  state.layer = state.trace && state.trace.header.layers === 1 ? 0 : layer;
  find("layer").value = state.layer + 1;
  find("layer-name").textContent = state.layer < 0 ? "all (mean span, longest life)" : `${state.layer + 1} of ${state.trace ? state.trace.header.layers : 1}`;
  soon("all");
}

function drawLegend() {
  const context = find("legend").getContext("2d");
  for (let x = 0; x < 120; x++) { context.fillStyle = css(colourAt(x / 119)); context.fillRect(x, 0, 1, 10); }
}

// Reading, comparing and writing: what needs the server

async function read(path, body, text) {
  busy?.abort();
  stopWriting();
  const mine = (busy = new AbortController());
  say("reading …", true);
  const began = performance.now();
  try {
    let last = 0, first = true;
    const trace = await fetchTrace(path, body, mine.signal, (growing) => {
      const now = performance.now();
      if (growing.size && (first || now - last > 150)) { if (first) setTrace(growing); first = false; last = now; goToEnd(growing); soon("all"); }
    });
    if (!trace.size) throw new Error("there was nothing to read");
    if (first) setTrace(trace);
    goToEnd(trace);
    state.text = text;
    find("other").value = wholeText(trace).slice(0, 20000);
    say("");
    soon("all");
    requestAnimationFrame(() => requestAnimationFrame(() => { root.dataset.milliseconds = Math.round(performance.now() - began); root.dataset.read = trace.size; }));
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
  }
}

function readText() {
  const text = find("text").value, size = new TextEncoder().encode(text).length;
  if (!text) return say("the text is empty, and there is nothing to remember; give at least one character", true);
  if (size > info.most_text) return say(`the page reads at most ${show(info.most_text)} bytes of text at once, got ${show(size)}; cut it, or write its trace with: expire-span trace`, true);
  return read("api/trace", { text }, text);
}

async function compare() {
  const limit = find("limit").value === "" ? null : Number(find("limit").value), text = find("other").value;
  const same = state.trace && text === wholeText(state.trace).slice(0, 20000), before = state.trace;
  say("comparing …", true);
  try {
    const words = info.vocabulary === "words" || !info.text;
    const after = await fetchTrace(!info.text || (same && words) ? "api/sample" : "api/trace", info.text ? { text, max_span: limit } : { max_span: limit });
    showComparison(before, after, state.layer, state.head, range, (i) => { setTrace(after, true); goTo(i); });
    say("");
  } catch (error) { say(error.message, true); }
}

function write() {
  stopWriting();
  let trace = null;
  writing = new Writing((line) => {
    if (line.kind === "header") { trace = new TraceData(line); return; }
    trace.push(line);
    if (trace.size === 1) setTrace(trace);
    const atEnd = state.cursor >= trace.size - 2;
    if (atEnd) goToEnd(trace);
    root.dataset.written = trace.size;
    soon("all");
  }, (error) => { writing = null; buttons(); if (error) say(error, true); });
  const started = writing;
  started.start({ text: find("text").value, temperature: Number(find("heat").value), seed: Number(find("seed").value) });
  buttons();
}

function stopWriting() { if (writing) { writing.abort.abort(); writing = null; } buttons(); }

function buttons() {
  for (const name of ["pause", "step", "stop"]) find(name).disabled = !writing;
  find("pause").textContent = writing && writing.paused ? "Resume" : "Pause";
}

function act(action) { if (writing) { writing.act(action); buttons(); } }

// Buttons, keys and the pointer

function connect() {
  const on = (name, event, what) => find(name).addEventListener(event, what);
  on("read", "click", readText);
  on("sample", "click", () => read("api/sample", {}, null));
  on("file", "change", async () => { const [file] = find("file").files; if (file) { if (file.size > info.most_text) say(`the page reads at most ${show(info.most_text)} bytes of text at once, got ${show(file.size)}`, true); else await read("api/trace", await file.arrayBuffer(), null); find("file").value = ""; } });
  on("write", "click", write);
  on("pause", "click", () => act(writing && writing.paused ? "resume" : "pause"));
  on("step", "click", () => act("step"));
  on("stop", "click", stopWriting);
  on("compare", "click", compare);
  on("layer", "input", () => pickLayer(Number(find("layer").value) - 1));
  on("head-pick", "change", () => { state.head = Number(find("head-pick").value); soon("all"); });
  on("layout", "change", () => { state.layout = find("layout").value; soon("all"); });
  on("still", "change", () => soon());
  on("scrub", "input", () => goTo(Number(find("scrub").value)));
  on("in", "click", () => zoom(0.6));
  on("out", "click", () => zoom(1 / 0.6));
  on("fit", "click", fit);
  on("before", "click", () => { state.page = Math.max(state.page - 1, 0); soon("tokens"); });
  on("after", "click", () => { if ((state.page + 1) * WINDOW < state.trace.size) state.page++; soon("tokens"); });
  on("link", "click", copyLink);
  on("export", "click", () => state.trace ? savePage(pristine, state.trace) : say("there is nothing to save yet"));
  on("help", "click", () => { find("keys").hidden = !find("keys").hidden; find("help").setAttribute("aria-expanded", String(!find("keys").hidden)); });
  for (const node of root.querySelectorAll("[data-save]")) node.addEventListener("click", () => savePicture(node.dataset.save, node.dataset.as, timeline).catch((error) => say(error.message)));
  for (const name of ["tokens", "old", "new"]) connectTokens(find(name), name === "tokens");
  on("strips", "click", (event) => { const box = find("strips").getBoundingClientRect(), [from, to] = tokenWindow(); goTo(from + (event.clientX - box.left - MARGIN) / (box.width - MARGIN) * (to - from)); });
  connectStage();
  document.addEventListener("keydown", onKey);
  darkMode.addEventListener("change", () => { timeline.quads.paint(); drawLegend(); soon("all"); });
  new ResizeObserver(() => soon("all")).observe(root);
}

function tip(event, text) {
  const node = find("tip");
  node.hidden = !text;
  if (!text) return;
  node.textContent = text;
  node.style.left = Math.max(Math.min(event.clientX + 14, innerWidth - node.offsetWidth - 6), 4) + "px";
  node.style.top = Math.max(Math.min(event.clientY + 14, innerHeight - node.offsetHeight - 6), 4) + "px";
}

function describe(i) {
  const { trace, cursor } = state, step = trace.step(i), lines = [`${visible(step.text)}   step ${show(i)}`];
  if (choice.span) {
    const left = choice.death[i] - cursor;
    lines.push(`span ${show(choice.span[i])}, lives to step ${show(choice.death[i])}`);
    lines.push(i > cursor ? "not yet born at the cursor" : left > 0 ? `${show(left)} steps left at the cursor` : "dead at the cursor");
  }
  if (step.bits != null) lines.push(`${show(step.bits)} bits, probability ${show(2 ** -step.bits)}`);
  return lines.join("\n");
}

function connectTokens(box, main) {
  box.addEventListener("pointermove", (event) => tip(event, main && event.target.dataset.i ? describe(Number(event.target.dataset.i)) : ""));
  box.addEventListener("pointerleave", (event) => tip(event, ""));
  box.addEventListener("click", (event) => { if (main && event.target.dataset.i) goTo(Number(event.target.dataset.i)); });
}

function connectStage() {
  const stage = find("stage");
  let drag = null;
  const place = (event) => { const box = stage.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  stage.addEventListener("pointerdown", (event) => { const [x] = place(event); drag = { x, from: timeline.from, to: timeline.to, moved: false }; stage.setPointerCapture(event.pointerId); });
  stage.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (!drag) { const i = timeline.memoryAt(x, y); tip(event, i < 0 ? "" : describe(i)); return; }
    if (Math.abs(x - drag.x) > 3) drag.moved = true;
    const shift = (drag.x - x) / stage.clientWidth * (drag.to - drag.from);
    if (drag.moved) { timeline.move(drag.from + shift, drag.to + shift); soon(); }
  });
  stage.addEventListener("pointerup", (event) => { if (drag && !drag.moved) goTo(Math.floor(timeline.timeAt(place(event)[0]))); drag = null; });
  stage.addEventListener("pointercancel", () => { drag = null; });
  stage.addEventListener("pointerleave", (event) => tip(event, ""));
  stage.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { const shift = (event.deltaX || event.deltaY) / stage.clientWidth * (timeline.to - timeline.from); timeline.move(timeline.from + shift, timeline.to + shift); }
    else timeline.zoom(Math.exp(Math.max(Math.min(event.deltaY, 200), -200) / 300), timeline.timeAt(place(event)[0]));
    soon();
  }, { passive: false });
}

function zoom(factor) { timeline.zoom(factor, Math.min(Math.max(state.cursor, timeline.from), timeline.to)); soon(); }
function fit() { timeline.move(0, timeline.end); soon(); }

function onKey(event) {
  if (/^(TEXTAREA|SELECT)$/.test(event.target.tagName) || event.target.type === "number" || event.ctrlKey || event.metaKey || event.altKey || !state.trace) return;
  if (event.target.type === "range" && event.key.startsWith("Arrow")) return;
  if (event.key === " " && event.target.tagName === "BUTTON") return;
  const far = event.shiftKey ? 10 : 1, wide = timeline.to - timeline.from;
  const keys = {
    ArrowRight: () => goTo(state.cursor + far), ArrowLeft: () => goTo(state.cursor - far), Home: () => goTo(0), End: () => goTo(state.trace.size - 1),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": fit,
    PageDown: () => { timeline.move(timeline.from + wide, timeline.to + wide); soon(); }, PageUp: () => { timeline.move(timeline.from - wide, timeline.to - wide); soon(); },
    l: () => pickLayer(state.layer + 1 < state.trace.header.layers ? state.layer + 1 : -1),
    b: () => { state.layout = state.layout === "packed" ? "birth" : "packed"; find("layout").value = state.layout; soon("all"); },
    Escape: stopWriting, " ": () => act(writing && writing.paused ? "resume" : "pause"),
  };
  const what = keys[event.key] || (event.shiftKey ? null : keys[event.key.toLowerCase()]);
  if (what) { event.preventDefault(); what(); }
}

async function copyLink() {
  const long = state.text != null && state.text.length > LONGEST_LINK;
  const values = { layer: state.layer, head: state.head, cursor: state.cursor, layout: state.layout, from: timeline.from.toFixed(2), to: timeline.to.toFixed(2), text: long ? null : state.text };
  history.replaceState(null, "", toLink(values));
  await navigator.clipboard?.writeText(location.href).catch(() => {});
  say(long ? "the link holds the view, but not the text, which is too long for one" : "the address now opens this view, and was copied");
}

function restore(values) {
  if (!state.trace) return;
  const number = (name, other) => { const x = Number(values[name]); return values[name] == null || Number.isNaN(x) ? other : x; };
  state.head = number("head", -1);
  find("head-pick").value = state.head;
  if (values.layout === "birth") { state.layout = "birth"; find("layout").value = "birth"; }
  pickLayer(Math.min(number("layer", state.layer), state.trace.header.layers - 1));
  redraw(LEVELS.indexOf("all"));
  timeline.move(number("from", 0), number("to", state.trace.size));
  goTo(number("cursor", state.trace.size - 1));
}

async function start() {
  connect();
  drawLegend();
  const packed = find("trace").textContent.trim();
  if (packed) { setTrace(await unpackTrace(packed)); restore(asked); }
  if (!live) { root.dataset.ready = "yes"; return; }
  info = await fetch("api/info").then((answer) => answer.json());
  find("name").textContent = info.name;
  find("input").hidden = !info.model;
  for (const name of ["text", "read", "writing"]) find(name).hidden = !info.text;
  find("file").parentElement.hidden = !info.text;
  root.querySelector('label[for="es-text"]').hidden = !info.text;
  find("writing").hidden = !info.generate;
  find("what").hidden = !info.model;
  find("other").hidden = !info.text;
  root.querySelector('label[for="es-other"]').hidden = !info.text;
  if (info.error) say(info.error, true);
  else if (asked.text) { find("text").value = asked.text; await readText(); }
  else await read("api/sample", {}, null);
  if (state.trace && Object.keys(asked).length) restore(asked);
  if (info.training && info.model) say(`the run is still training; this is its checkpoint ${info.checkpoint}`);
  root.dataset.ready = "yes";
}

root.timeline = timeline;
root.state = state;
root.resting = () => !waiting && !drawSlowly.timer && !goTo.timer;
start().catch((error) => say(error.message, true));
