// The state of the page, and what is redrawn when it changes.

const root = find("view"), script = find("script"), pristine = root.outerHTML;
const live = script.dataset.live === "yes", LONGEST_LINK = 2000, SETTLED = 120;
const state = { trace: null, layer: -1, head: -1, cursor: 0, layout: "packed", text: null, page: 0 };
const picked = { layer: false, layout: false };  // whether the user chose it; then the page no longer chooses by itself
const asked = fromLink();
const timeline = new Timeline(find("stage"), find("gl"), find("ink"), asked.gl);
let suggested = "words";  // the kind of lines that the page chooses
let choice = { span: null, death: null }, lines = choice, range = [0, 1], ranges = [], writing = null, info = {}, waiting = 0, busy = null, compared = {};

function say(message, lasting) {
  find("status").textContent = message;
  find("status").hidden = !message;
  clearTimeout(say.timer);
  if (message && !lasting) say.timer = setTimeout(() => say(""), 6000);
}

// How much is redrawn, from least to most; each level includes those before it: the timeline, the marks of the cursor, newly generated tokens,
// the text, everything.
const LEVELS = ["draw", "marks", "grown", "tokens", "all"];

function soon(what = "draw") {
  soon.wanted = Math.max(soon.wanted || 0, LEVELS.indexOf(what));
  if (!waiting) waiting = requestAnimationFrame(drawFrame);
}

function drawFrame() {
  const wanted = soon.wanted, began = performance.now(), shown = unseen.splice(0);
  waiting = 0;
  soon.wanted = 0;
  redraw(wanted);
  setTimeout(() => {  // the frame has been laid out and painted by now
    if (wanted >= LEVELS.indexOf("tokens")) redraw.cost = performance.now() - began;
    noteDelays(shown);
  });
}

// How long ago each token that a frame has shown was drawn by the model, in milliseconds; the last thousand tokens.
function noteDelays(drawn) {
  const now = performance.timeOrigin + performance.now();
  root.delays.push(...drawn.map((at) => now - at));
  root.delays.splice(0, root.delays.length - 1000);
}

// While the model generates, the newest tokens and the timeline are drawn in the next frame. The other parts take turns, so that no frame has
// to draw them all, and the slower they are the longer the pause between turns; after the last token each part is drawn once more.
const PARTS = [() => { drawRanges(); drawBelow(); }, () => drawCosts(state.trace, state.cursor), () => drawMarks()];

function grow() {
  soon("grown");
  grow.left = PARTS.length;
  if (!grow.timer) grow.timer = setTimeout(follow, SETTLED);
}

function follow() {
  const began = performance.now();
  grow.turn = ((grow.turn || 0) + 1) % PARTS.length;
  PARTS[grow.turn]();
  grow.timer = --grow.left > 0 ? setTimeout(follow, Math.max(SETTLED, 8 * (performance.now() - began))) : 0;
}

// Whether this is the first frame of a text that is being generated, whose first token is waiting to be shown; asked again, it no longer is.
function claimFirstFrame() {
  const begins = Boolean(writing && writing.begins);
  if (writing) writing.begins = false;
  return begins;
}

function redraw(wanted) {
  const { trace } = state, reaches = (level) => wanted >= LEVELS.indexOf(level);
  if (!trace || !trace.size) return;
  if (reaches("all") || (reaches("grown") && choice.death && choice.death.length < trace.size)) choose();
  if (reaches("all")) drawRanges();
  if (reaches("grown")) fillText();
  if (reaches("grown")) drawWritten();
  timeline.cursor = state.cursor;
  if (trace.hasSpans) timeline.draw();
  keepAddress();
  if (wanted === LEVELS.indexOf("grown") || claimFirstFrame()) return;  // the other parts take turns
  if (reaches("marks")) drawMarks();
  if (reaches("all")) drawCosts(trace, state.cursor);
  drawBelow();
}

function drawBelow() {
  const { trace } = state;
  if (trace.hasSpans) drawStrips(find("strips"), trace, ranges, ...tokenWindow(), state.cursor, state.layer);
  if (trace.hasHidden) drawHidden(find("hidden"), trace, Math.max(state.layer, 0), ...hiddenWindow(), find("still").checked, state.cursor);
  if (trace.hasHidden) find("hidden-window").textContent = `Units from the top, steps ${show(hiddenWindow()[0])} to ${show(hiddenWindow()[1] - 1)}; move the cursor to see others.`;
}

// Takes spans and deaths of the chosen layer and head from the trace and loads them into the timeline.
function choose() {
  const { trace } = state, following = timeline.to >= timeline.end;
  if (trace.hasSpans) {
    choice = trace.choose(state.layer, state.head);
    if (!picked.layout || (state.layout === "words" && !wordsOf(trace))) state.layout = hasWords(trace) ? suggested : "packed";
    const words = state.layout === "words", { vocabulary } = trace.header, nameOf = vocabulary === "bytes" && !words ? null : (i) => words ? wordAt(trace, i) : visible(trace.text[i]);
    lines = words ? joinWords(trace, choice) : choice;
    const fresh = rangeOf(lines.span.filter((_, i) => lines.death[i] > i));
    if (!writing || differ(fresh, range)) range = fresh;
    timeline.load(lines, state.layout, range, trace.header.ramp, trace.size, ROWS[state.layout], nameOf, Boolean(writing && !writing.paused));
    if (following || timeline.to <= timeline.from) timeline.move(timeline.from, trace.size);
  } else choice = { span: null, death: null };
  find("scrub").max = trace.size - 1;
  if (state.cursor >= trace.size) goToEnd(trace);
}

// During generation the shortest and longest span change a little with every token; the colour scale follows only a visible difference.
function differ(fresh, old) { return fresh.some((x, n) => Math.abs(Math.log1p(Math.max(x, 0)) - Math.log1p(Math.max(old[n], 0))) > 0.05); }

// Legends and explanations, and which sections are shown for this trace.
function drawRanges() {
  const { trace } = state;
  if (trace.hasSpans) {
    ranges = Array.from({ length: trace.header.layers }, (_, layer) => rangeOf(trace.choose(layer, -1).span));
    find("intro").textContent = introOf(trace) + SHADES[dark ? "dark" : "light"];
    find("shortest").textContent = show(range[0]);
    find("longest").textContent = `${show(range[1])} steps`;
    find("rows").textContent = aboutRows();
    find("layout").value = state.layout;
    find("layout").options[0].hidden = find("layout").options[0].disabled = !wordsOf(trace);
  }
  if (!trace.hasSpans) find("intro").textContent = PLAIN_INTRO;
  drawHeadline();
  for (const node of root.querySelectorAll(".es-pieces")) node.textContent = trace.header.task === "env" ? "What it saw" : "Tokens";
  find("limit-box").hidden = find("budget-box").hidden = !trace.hasSpans;
  find("what").hidden = !compared.after && (!info.model || (!info.text && !trace.hasSpans));
  find("what-ask").hidden = !info.model;  // a saved page shows its comparison, and cannot make another
  const tries = [...(info.text ? ["change a word"] : []), ...(trace.hasSpans ? CUTS : [])].join(", or ");
  find("tries").textContent = `${tries.charAt(0).toUpperCase()}${tries.slice(1)}, and compare.`;
  for (const name of ["stage", "strips", "strips-saves", "zooms", "living-box", "life-title", "lines", "token-title"]) find(name).hidden = !trace.hasSpans;
  find("choice").hidden = !trace.hasSpans && trace.header.layers < 2;
  find("layout-box").hidden = find("legend-box").hidden = !trace.hasSpans;
  find("step-title").hidden = find("plain-title").hidden = trace.hasSpans;
  find("hidden-box").hidden = find("studies").hidden = !trace.hasHidden;
  if (trace.hasHidden) drawStretches();
  drawComparison();
}

const CUTS = ["let nothing live longer than a limit", "tighten the budget (all lifetimes are multiplied by one factor, so that this many memories are alive on average)"];
const ROWS = { words: "words held", packed: "memories held", birth: "memory, by birth" };

function aboutRows() {
  const life = "to the step at which it is deleted, fading on its ramp";
  if (state.layout === "words") return `Each line is one word, from the step that wrote it ${life}: as long as the longest-lived of its tokens. The model holds at most ${count(timeline.height, "word")} at once.`;
  return `Each line is one memory, from the step that wrote it ${life}. ` +
    (state.layout === "packed" ? `The model holds at most ${count(timeline.height, "memory")} at once.` : "The oldest memory is at the top.");
}

function fillText() {
  const { trace } = state, [from, to] = tokenWindow(), box = find("tokens");
  find("turn").hidden = trace.size <= WINDOW;
  find("window").textContent = `tokens ${show(from)} to ${show(to - 1)} of ${show(trace.size)}`;
  fillTokens(box, trace, choice.span, range, from, to, { key: [from, state.layer, state.head, ...range, dark].join() });
  if (writing && state.cursor === trace.size - 1) box.scrollTop = box.scrollHeight;
}

// Lists the constant stretches of a recurrent state: steps over which a unit hardly changes.
function drawStretches() {
  const { trace } = state, [from, to] = tokenWindow(), states = [];
  for (let i = from; i < to; i++) states.push(trace.step(i).hidden[Math.max(state.layer, 0)]);
  const found = findStretches(states), name = ({ unit, from: a, to: b, value }) => chip(`unit ${unit + 1}: ${show(value)}`, `${b - a + 1} steps`, () => goTo(from + a));
  fillChips(find("stretches"), found.slice(0, 24).map(name), "none of five steps or more");
}

// Number of steps of the hidden state that are shown at once: few enough for a constant stretch to be visible.
const HIDDEN_STEPS = 128;

function hiddenWindow() {
  const from = Math.floor(state.cursor / HIDDEN_STEPS) * HIDDEN_STEPS;
  return [from, Math.min(from + HIDDEN_STEPS, state.trace.size)];
}

function tokenWindow() {
  const from = Math.min(state.page * WINDOW, Math.max(state.trace.size - 1, 0));
  return [from, Math.min(from + WINDOW, state.trace.size)];
}

function drawMarks() {
  find("scrub").value = state.cursor;
  drawEpisode();
  drawSlowly();
}

function drawFacts() {
  const { trace, cursor } = state, step = trace.step(cursor), { layers } = trace.header;
  find("at").textContent = show(cursor);
  for (const name of ["live", "bytes", "bits"]) moveCursor(find(name), cursor);
  const rows = [[trace.header.task === "env" ? "it sees" : "token", visible(step.text)]];
  if (step.bits != null) rows.push(["cost", `${show(step.bits)} bits (probability ${show(2 ** -step.bits)})`]);
  if (step.action != null) rows.push(["it does", step.action]);
  if (step.reward) rows.push(["reward", show(step.reward)]);
  if (step.value != null) rows.push(["expects a return of", show(step.value)]);
  if (step.answer) rows.push(["asked for", `${step.answer.text}, ${show(step.answer.bits)} bits`]);
  for (let layer = 0; layer < Math.min(layers, 12); layer++) {
    const spans = step.spans ? step.spans[layer].map(showLeft) : [], told = spans.length ? [tellSpans(spans)] : [];
    rows.push([`layer ${layer + 1}`, [...told, `${show(step.live[layer])} alive`, showBytes(step.bytes[layer])].join(" · ")]);
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
  find("expects").textContent = trace.header.task === "env" ? "Its next action" : "The model expects";
  find("alive").textContent = count(choice.death ? livingAt(cursor).length : trace.live.reduce((sum, column) => sum + column.data[cursor], 0) / layers, "memory");
}

// The spans that one layer gives a token, by head; for more than six heads only their number.
function tellSpans(spans) {
  if (spans.length > 6) return `${spans.length} heads`;
  return spans.length > 1 ? `spans by head ${spans.join(" | ")}` : `span ${spans[0]}`;
}

// What the agent sees and does at the cursor. Drawn in every frame, so that an episode plays smoothly.
function drawEpisode() {
  const step = state.trace.step(state.cursor);
  find("episode").hidden = !step.image;
  if (!step.image) return;
  find("image").src = "data:image/png;base64," + step.image.replace(/[^A-Za-z0-9+/=]/g, "");
  const end = step.success == null ? "" : step.success ? " · solved" : " · failed";
  find("doing").textContent = `${visible(step.text)}${step.action != null ? ` → ${step.action}` : ""}${end}`;
}

function livingAt(cursor) {
  const living = [];
  for (let i = state.layout === "words" ? 0 : timeline.firstAlive(cursor); i <= cursor; i++) if (choice.death[i] > cursor) living.push(i);
  return living;
}

// Parts with many elements are redrawn a few times a second while the cursor moves fast, less often the slower they are, and at once when it rests.
function drawSlowly() {
  const wait = (drawSlowly.last || 0) + Math.max(SETTLED, 5 * (drawSlowly.cost || 0)) - performance.now();
  clearTimeout(drawSlowly.timer);
  drawSlowly.timer = 0;
  if (wait > 0) { drawSlowly.timer = setTimeout(drawSlowly, wait); return; }
  drawSlowly.last = performance.now();
  markTokens(find("tokens"), choice.death, state.cursor, Boolean(writing) || state.cursor < state.trace.size - 1);
  drawFacts();
  drawLiving();
  requestAnimationFrame(() => setTimeout(() => { drawSlowly.cost = Math.min(performance.now() - drawSlowly.last, 200); }));
}

function drawLiving() {
  const { trace, cursor } = state, living = choice.death ? livingAt(cursor) : [];
  living.sort((a, b) => choice.death[b] - choice.death[a] || a - b);
  const words = hasWords(trace), shown = words ? firstOfEach(living, (i) => wordsOf(trace).first[i]) : living;
  find("alive-words").textContent = words ? ` in ${count(shown.length, "word")}` : "";
  fillChips(find("living"), shown.slice(0, 60).map((i) =>
    chip(words ? wordAt(trace, i) : trace.text[i], showLeft(choice.death[i] - cursor), () => goTo(i), colourAt(shareOf(choice.span[i], range)))));
  if (shown.length > 60) find("living").append(element("span", `and ${show(shown.length - 60)} more`, "es-soft"));
}

// The first item of each group; items of group -1 are left out.
function firstOfEach(list, group) {
  const seen = new Set([-1]);
  return list.filter((i) => !seen.has(group(i)) && seen.add(group(i)));
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

// Shows the part of a long text that contains the cursor. Called only once the cursor rests, since filling it takes long.
function turn() {
  goTo.timer = 0;
  state.page = Math.floor(state.cursor / WINDOW);
  soon("tokens");
}

// Shows the layer and the lines in which this text shows forgetting best, unless the user has chosen a layer.
function settleLayer() {
  const { trace } = state;
  if (picked.layer || !trace.hasSpans || !trace.size || (writing && state.layer >= 0)) return;
  const best = bestView(trace);
  suggested = best.layout;
  pickLayer(best.layer);
}

function pickLayer(layer) {
  state.layer = state.trace && (state.trace.header.layers === 1 || !state.trace.hasSpans) ? Math.max(layer, 0) : layer;
  find("layer").value = state.layer + 1;
  find("layer-name").textContent = state.layer < 0 ? "all (mean span, longest life)" : `${state.layer + 1} of ${state.trace ? state.trace.header.layers : 1}${picked.layer || !state.trace?.hasSpans ? "" : ", where forgetting shows best"}`;
  soon("all");
}

function drawLegend() {
  const context = find("legend").getContext("2d");
  for (let x = 0; x < 120; x++) { context.fillStyle = css(colourAt(x / 119)); context.fillRect(x, 0, 1, 10); }
}

// A link may be damaged or made for another model: what does not fit is left as it is, or brought into its range.
function restore(values) {
  if (!state.trace) return;
  const { layers, heads } = state.trace.header, within = (x, most) => Math.min(Math.max(Math.round(x), -1), most - 1);
  const number = (name, other) => { const x = Number(values[name]); return values[name] == null || !Number.isFinite(x) ? other : x; };
  state.head = within(number("head", -1), heads);
  find("head-pick").value = state.head;
  if (ROWS[values.layout]) { state.layout = values.layout; picked.layout = true; }
  if (values.layer != null) picked.layer = true;
  pickLayer(within(number("layer", state.layer), layers));
  redraw(LEVELS.indexOf("all"));
  timeline.move(number("from", 0), number("to", state.trace.size));
  goTo(number("cursor", state.trace.size - 1));
}

async function start() {
  connect();
  drawLegend();
  const packed = find("trace").textContent.trim();
  if (packed) { setTrace(await unpackTrace(packed)); await openComparison(asked); restore(asked); }
  if (!live) { root.dataset.ready = "yes"; return; }
  addEventListener("hashchange", () => location.reload());  // another link was opened in this tab; copyLink causes no such event
  info = await fetch("api/info").then((answer) => answer.json());
  find("name").textContent = info.name || "a model";
  find("input").hidden = !info.model;
  find("number-box").hidden = !info.agent;
  find("example").hidden = !info.text || info.vocabulary === "words";
  if (info.agent) { find("sample").title = "";  find("sample").textContent = "Play another episode"; find("number").value = asked.episode ?? ""; }
  for (const name of ["text", "read", "writing"]) find(name).hidden = !info.text;
  find("file").parentElement.hidden = !info.text;
  root.querySelector('label[for="es-text"]').hidden = !info.text;
  find("writing").hidden = !info.generate;
  find("other").hidden = !info.text;
  root.querySelector('label[for="es-other"]').hidden = !info.text;
  if (info.error) say(info.error, true);
  else if (asked.read === "sample") await readSample();
  else if (asked.text && info.text) { find("text").value = asked.text; await readText(); }
  else await (info.example || (asked.read === "example" && info.text) ? readExample() : readSample());
  await compareAsAsked(asked);
  if (state.trace && Object.keys(asked).length) restore(asked);
  if (info.training && state.trace) say(`the run has not finished training; this is its checkpoint ${info.checkpoint}`);
  root.dataset.ready = "yes";
}

root.studies = { makeSeries, runCounter, detect, runLeaky, weightsOf, stretchLengths };
root.delays = [];
root.timeline = timeline;
root.state = state;
root.resting = () => !waiting && !drawSlowly.timer && !goTo.timer && (!grow.timer || Boolean(writing && !writing.paused));
start().catch((error) => say(error.message, true));
