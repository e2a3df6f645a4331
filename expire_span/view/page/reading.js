// Reading, comparing and generating: requests to the server, and what the page does with the answers.

const PAUSE = 400;  // milliseconds at least between two pictures of a trace that is still coming

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
      if (!growing.size || (!first && now - last < Math.max(PAUSE, 8 * (redraw.cost || 0)))) return;  // the model needs the processor more
      if (first) { setTrace(growing); noteFirst(began); }
      first = false;
      last = now;
      goToEnd(growing);
      soon("all");
    });
    if (!trace.size) throw new Error("there was nothing to read");
    if (first) { setTrace(trace); noteFirst(began); }
    goToEnd(trace);
    settleLayer();
    state.text = text;
    showText(text ?? wholeText(trace));
    say("");
    soon("all");
    requestAnimationFrame(() => requestAnimationFrame(() => { root.dataset.milliseconds = Math.round(performance.now() - began); root.dataset.opened ??= Math.round(performance.now()); root.dataset.read = trace.size; }));
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
  }
}

// Puts the text that was read into both text fields, to be edited; for the example, the second field holds its changed version.
function showText(text) {
  const ours = text === EXAMPLE;
  if (info.text) find("text").value = text;
  if (info.text) find("other").value = ours ? EXAMPLE_CHANGED : text;
  find("hint").hidden = !ours;
}

function readExample() { return read("api/trace", { text: EXAMPLE }, EXAMPLE); }

// Records the milliseconds until the first picture.
function noteFirst(began) { requestAnimationFrame(() => requestAnimationFrame(() => { root.dataset.first = Math.round(performance.now() - began); })); }

// Reads the task's sample; for an agent, the episode whose number is in the field.
function readSample() { return saying(() => read("api/sample", episodeAsked(), null)); }

// Runs a function and shows its error in the page.
async function saying(what) {
  try { return await what(); } catch (error) { say(error.message, true); }
}

function episodeAsked() {
  const episode = info.agent ? numberIn("number") : null;
  return episode == null ? {} : { episode };
}

function playAnother() {
  if (info.agent && state.trace) find("number").value = Math.max(Math.floor(Number(find("number").value)) || 0, -1) + 1;
  return readSample();
}

function readText() {
  const text = find("text").value;
  if (!text) return say("the text box is empty; type or paste something into it, or press Read test data", true);
  return fits(text) ? read("api/trace", { text }, text) : null;
}

async function readFile() {
  const [file] = find("file").files;
  if (!file) return;
  if (file.size > info.most_text) sayTooLong(file.size);
  else {
    const data = await file.arrayBuffer();  // a trace of pieces does not give back characters that are spread over several
    await read("api/trace", data, info.vocabulary === "pieces" ? new TextDecoder().decode(data) : null);
  }
  find("file").value = "";
}

// Whether a text is within the size limit; if not, the page says so and sends nothing.
function fits(text) {
  const size = new TextEncoder().encode(text).length, long = size > info.most_text;
  if (long) sayTooLong(size);
  return !long;
}

function sayTooLong(size) {
  say(`the page reads at most ${show(info.most_text)} bytes of text at once, got ${show(size)}; cut it, or write its trace with: expire-span trace RUN --text FILE`, true);
}

// Refuses a paste over the size limit before the field takes it: laying out megabytes of text would freeze the page.
function refuseTooLong(event) {
  if (!fits(event.clipboardData ? event.clipboardData.getData("text/plain") : "")) event.preventDefault();
}

async function compare() {
  const text = find("other").value;
  if (!fits(text)) return;
  if (info.text && !text) return say("the box of the other text is empty; type something into it to compare with", true);
  const before = compared.before || state.trace, same = before && text === (state.text ?? wholeText(before));
  say("comparing …", true);
  try {
    const cut = { max_span: numberIn("limit"), live: numberIn("budget") }, sampled = !info.text || (same && info.vocabulary === "words");
    const after = await (sampled ? fetchTrace("api/sample", { ...cut, ...episodeAsked() }) : fetchTrace("api/trace", { text, ...cut }));
    compared = { before, after, cut, asked: { limit: cut.max_span, budget: cut.live, other: same || !info.text ? null : text } };
    showSide("before");
    drawComparison();
    say("");
  } catch (error) { say(error.message, true); }
}

// Chooses whether the pictures show the text before or after the change.
function showSide(name) {
  find("side").hidden = false;
  find("side-pick").value = name;
  if (state.trace !== compared[name]) setTrace(compared[name], true);
}

// Draws both texts side by side in the chosen layer, unless they are drawn already.
function drawComparison() {
  const key = [state.layer, state.head, picked.layer, dark].join();
  if (!compared.after || compared.key === key) return;
  compared.key = key;
  const look = (i) => { showSide("after"); goTo(i); find("stage").scrollIntoView({ block: "nearest" }); };
  showComparison(compared.before, compared.after, { layer: state.layer, head: state.head, told: picked.layer ? state.layer : -1 }, compared.cut, look);
}

function forgetComparison() {
  compared = {};
  find("verdict").hidden = find("side").hidden = true;
}

// The settings of the comparison for a link, and below, the comparison that a link asks for.
function comparisonAsked() {
  return compared.after ? { ...compared.asked, side: find("side-pick").value } : {};
}

async function compareAsAsked({ limit, budget, other, side }) {
  if (!state.trace || !info.model || (limit ?? budget ?? other) == null) return;
  find("limit").value = limit ?? "";
  find("budget").value = budget ?? "";
  find("other").value = other ?? find("text").value;
  await compare();
  if (side === "after" && compared.after) showSide("after");
}

// Opens the comparison of a saved page, whose second trace is the text after the change.
async function openComparison({ limit, budget, side }) {
  const packed = find("trace-after")?.textContent.trim();
  if (!packed) return;
  compared = { before: state.trace, after: await unpackTrace(packed), cut: { max_span: limit && Number(limit), live: budget && Number(budget) }, asked: { limit, budget } };
  showSide(side === "after" ? "after" : "before");
}

function saveView() {
  if (!state.trace) return say("there is nothing to save yet");
  const { limit, budget, side } = comparisonAsked();
  return savePage(pristine, compared.before || state.trace, compared.after, toLink({ ...chosen(), limit, budget, side }));
}

function write() {
  if (!fits(find("text").value)) return;
  let asked;
  try {
    asked = { text: find("text").value, temperature: numberIn("heat") ?? 1, seed: numberIn("seed") ?? 0 };
  } catch (error) { return say(error.message, true); }
  stopWriting();
  say("");
  let trace = null;
  writing = new Writing((line) => {
    if (line.kind === "header") { started.trace = trace = new TraceData(line); return; }
    trace.push(line);
    if (trace.size === 1) { setTrace(trace); started.begins = true; find("other").value = asked.text; find("hint").hidden = true; }
    const atEnd = state.cursor >= trace.size - 2;
    if (atEnd) goToEnd(trace);
    root.dataset.written = trace.size;
    if (line.at) unseen.push(line.at);
    grow();
  }, (error) => { if (writing === started) stopWriting(); if (error) say(error, true); });
  const started = Object.assign(writing, { prompt: asked.text });
  started.start(asked);
  find("written").hidden = false;
  find("prompt").textContent = find("newest").textContent = "";
  find("written").scrollIntoView({ block: "nearest" });
  buttons();
}

// When the model drew each token that no frame has shown yet. Text that is stopped still shows its last tokens.
const unseen = [];

function stopWriting() {
  const { trace, prompt } = writing || {};
  if (writing) { writing.abort.abort(); writing = null; settleLayer(); soon("all"); }
  if (trace && trace === state.trace) keepWritten(trace, prompt);
  buttons();
}

// Makes the generated text the one that a link holds and that a comparison starts from. Of pieces, the prompt is taken as it was typed:
// a character that is spread over several of them cannot be put together again.
function keepWritten(trace, prompt) {
  const pieces = prompt && trace.header.vocabulary === "pieces";
  state.text = pieces ? prompt + trace.lines.filter((line) => line.at).map((line) => line.text).join("") : wholeText(trace);
  find("other").value = state.text;
  find("hint").hidden = true;
}

function buttons() {
  for (const name of ["pause", "step", "stop"]) find(name).disabled = !writing;
  find("pause").textContent = writing && writing.paused ? "Resume" : "Pause";
}

function act(action) { if (writing) { writing.act(action); buttons(); } }

// The text that is being generated, below the buttons that started it: its last lines, the end of the prompt in a softer colour.
function drawWritten() {
  const { trace } = state, box = find("written"), first = writing && writing.trace === trace ? (writing.first ??= firstWritten(trace)) : null;
  if (first != null) {
    box.trace = trace;
    find("prompt").textContent = textOf(trace, Math.max(first - 80, trace.size - 600), first);
    find("newest").textContent = textOf(trace, Math.max(first, trace.size - 600), trace.size);
  }
  box.hidden = !writing && box.trace !== trace;
}

// The first token that the model drew itself; null while there is none.
function firstWritten(trace) {
  const at = trace.lines.findIndex((line) => line.at);
  return at < 0 ? null : at - 1;
}
