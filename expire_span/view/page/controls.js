// Buttons, keys and the pointer.

function connect() {
  const on = (name, event, what) => find(name).addEventListener(event, what);
  on("read", "click", readText);
  on("example", "click", readExample);
  on("sample", "click", playAnother);
  on("number", "change", readSample);
  on("play", "click", play);
  on("file", "change", readFile);
  for (const name of ["text", "other"]) on(name, "paste", refuseTooLong);
  on("write", "click", write);
  on("pause", "click", () => act(writing && writing.paused ? "resume" : "pause"));
  on("step", "click", () => act("step"));
  on("stop", "click", stopWriting);
  on("compare", "click", compare);
  on("other", "input", () => { find("hint").hidden = true; });
  on("layer", "input", () => { picked.layer = true; pickLayer(Number(find("layer").value) - 1); });
  on("head-pick", "change", () => { state.head = Number(find("head-pick").value); soon("all"); });
  on("layout", "change", () => pickLayout(find("layout").value));
  on("still", "change", () => soon());
  on("hidden", "click", (event) => goTo(hiddenAt(event).step));
  on("hidden", "pointermove", (event) => tip(event, describeUnit(hiddenAt(event))));
  on("hidden", "pointerleave", (event) => tip(event, ""));
  on("studies", "toggle", drawStudies);
  for (const name of ["seed", "steep", "ratio"]) on("study-" + name, "input", drawStudies);
  on("scrub", "input", () => goTo(Number(find("scrub").value)));
  on("in", "click", () => zoom(0.6));
  on("out", "click", () => zoom(1 / 0.6));
  on("fit", "click", fit);
  on("before", "click", () => { state.page = Math.max(state.page - 1, 0); soon("tokens"); });
  on("after", "click", () => { if ((state.page + 1) * WINDOW < state.trace.size) state.page++; soon("tokens"); });
  on("link", "click", copyLink);
  find("link").hidden = location.protocol === "about:";  // a frame within a notebook has no address of its own
  on("export", "click", saveView);
  on("help", "click", () => showKeys(find("keys").hidden));
  for (const node of root.querySelectorAll("[data-save]")) {
    node.title = `Save this picture as ${node.dataset.as.toUpperCase()}`;
    node.addEventListener("click", () => savePicture(node.dataset.save, node.dataset.as, timeline).catch((error) => say(error.message)));
  }
  on("side-pick", "change", () => showSide(find("side-pick").value));
  for (const box of root.querySelectorAll(".es-chips")) box.addEventListener("keydown", (event) => walkChips(box, event));
  for (const name of ["tokens", "old", "new"]) connectTokens(find(name), name === "tokens");
  on("strips", "click", (event) => { const box = find("strips").getBoundingClientRect(), [from, to] = tokenWindow(); goTo(from + (event.clientX - box.left - MARGIN) / (box.width - MARGIN) * (to - from)); });
  connectStage();
  document.addEventListener("keydown", onKey);
  darkMode.addEventListener("change", () => { timeline.quads.paint(); drawLegend(); soon("all"); });
  watchSizes();
}

// Redraws when a picture has become wider or narrower, or the timeline higher or lower. Not whenever the page becomes longer: during generation
// every new line of text makes it so, and the pictures stay as they are.
function watchSizes() {
  const pictures = ["stage", "strips", "hidden", "live", "bytes", "bits", "studies", "both-held"].map(find), sizes = new Map();
  const isNew = ({ target, contentRect: { width, height } }) => {
    const size = target.id === "es-stage" ? `${width} ${height}` : `${width}`, known = sizes.get(target);
    sizes.set(target, size);
    return size !== known;
  };
  const observer = new ResizeObserver((entries) => { if (entries.filter(isNew).length) { soon("all"); drawStudies(); } });
  for (const picture of pictures) observer.observe(picture);
}

function tip(event, text) {
  const node = find("tip");
  node.hidden = !text;
  if (!text) return;
  node.textContent = text;
  node.style.left = Math.max(Math.min(event.clientX + 14, innerWidth - node.offsetWidth - 6), 4) + "px";
  node.style.top = Math.max(Math.min(event.clientY + 14, innerHeight - node.offsetHeight - 6), 4) + "px";
}

// What a token is and how long it lives, or, with `line`, what a line of the timeline shows: it may be a whole word.
function describe(i, line) {
  const { trace, cursor } = state, step = trace.step(i), word = line && state.layout === "words", { span, death } = line ? lines : choice;
  const out = [`${word ? wordAt(trace, i) : visible(step.text)}   step ${show(i)}`];
  if (span) {
    const left = death[i] - cursor;
    out.push(span[i] < FOR_GOOD ? `span ${show(span[i])} steps${word ? " (its longest)" : ""}, lives to step ${show(death[i])}` : "kept for good");
    out.push(i > cursor ? "not yet born at the cursor" : left >= FOR_GOOD ? "alive at the cursor" : left > 0 ? `${show(left)} steps left at the cursor` : "dead at the cursor");
  }
  if (!word && step.bits != null) out.push(`${show(step.bits)} bits, probability ${show(2 ** -step.bits)}`);
  return out.join("\n");
}

// Step and unit of the hidden state under the pointer.
function hiddenAt(event) {
  const box = find("hidden").getBoundingClientRect(), [from, to] = hiddenWindow(), values = state.trace.step(from).hidden[Math.max(state.layer, 0)];
  const within = (share, count) => Math.min(Math.max(Math.floor(share * count), 0), count - 1);
  return { step: from + within((event.clientX - box.left) / box.width, to - from), unit: within((event.clientY - box.top) / box.height, values.length) };
}

function describeUnit({ step, unit }) {
  const { trace } = state;
  return `unit ${unit + 1} is ${show(trace.step(step).hidden[Math.max(state.layer, 0)][unit])}\nat ${visible(trace.text[step])}   step ${show(step)}`;
}

function pickLayout(layout) { picked.layout = true; state.layout = layout; soon("all"); }

// Switches to the next layout (a line for each word, each memory, or by birth) that this trace allows.
function nextLayout() {
  const kinds = Object.keys(ROWS).filter((kind) => kind !== "words" || wordsOf(state.trace));
  pickLayout(kinds[(kinds.indexOf(state.layout) + 1) % kinds.length]);
}

function connectTokens(box, main) {
  box.addEventListener("pointermove", (event) => tip(event, main && event.target.dataset.i ? describe(Number(event.target.dataset.i)) : ""));
  box.addEventListener("pointerleave", (event) => tip(event, ""));
  box.addEventListener("click", (event) => { if (main && event.target.dataset.i) goTo(Number(event.target.dataset.i)); });
}

// Dragging with one pointer pans the timeline. Two fingers zoom it: the step under their midpoint stays there.
function connectStage() {
  const stage = find("stage"), fingers = new Map();
  let drag = null, pinch = null;
  const spread = () => { const [[a, b], [c, d]] = [...fingers.values()]; return { apart: Math.max(Math.hypot(a - c, b - d), 20), x: (a + c) / 2 }; };
  const place = (event) => { const box = stage.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  stage.addEventListener("pointerdown", (event) => {
    const [x, y] = place(event);
    fingers.set(event.pointerId, [x, y]);
    stage.setPointerCapture(event.pointerId);
    if (fingers.size === 2) { drag = null; pinch = { wide: timeline.to - timeline.from, apart: spread().apart, time: timeline.timeAt(spread().x) }; }
    if (fingers.size === 1) drag = { x, from: timeline.from, to: timeline.to, moved: false };
  });
  stage.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, [x, y]);
    if (pinch) {
      const now = spread(), wide = pinch.wide * pinch.apart / now.apart, from = pinch.time - now.x / stage.clientWidth * wide;
      timeline.move(from, from + wide);
      soon();
      return;
    }
    if (!drag) { const i = timeline.memoryAt(x, y); tip(event, i < 0 ? "" : describe(i, true)); return; }
    if (Math.abs(x - drag.x) > 3) drag.moved = true;
    const shift = (drag.x - x) / stage.clientWidth * (drag.to - drag.from);
    if (drag.moved) { timeline.move(drag.from + shift, drag.to + shift); soon(); }
  });
  const lift = (event) => { fingers.delete(event.pointerId); drag = pinch = null; };
  stage.addEventListener("pointerup", (event) => { if (drag && !drag.moved) { tip(event, ""); goTo(Math.floor(timeline.timeAt(place(event)[0]))); } lift(event); });
  stage.addEventListener("pointercancel", lift);
  stage.addEventListener("pointerleave", (event) => tip(event, ""));
  stage.addEventListener("wheel", (event) => {
    event.preventDefault();
    tip(event, "");
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { const shift = (event.deltaX || event.deltaY) / stage.clientWidth * (timeline.to - timeline.from); timeline.move(timeline.from + shift, timeline.to + shift); }
    else timeline.zoom(Math.exp(Math.max(Math.min(event.deltaY, 200), -200) / 300), timeline.timeAt(place(event)[0]));
    soon();
  }, { passive: false });
}

// Moves the cursor to the end at the chosen number of steps a second; if it is at the end, it starts from the beginning.
function play() {
  if (play.timer) { stopPlaying(); return; }
  if (!state.trace) return;
  if (state.cursor >= state.trace.size - 1) goTo(0);
  let last = performance.now(), due = 0;  // steps that are due by the clock, with their fraction
  find("play").textContent = "Stop";
  play.timer = setInterval(() => {
    const now = performance.now(), whole = Math.floor(due += (now - last) / 1000 * Number(find("speed").value));
    last = now;
    due -= whole;
    if (whole) goTo(state.cursor + whole);
    if (state.cursor >= state.trace.size - 1) stopPlaying();
  }, 16);
}

function stopPlaying() {
  clearInterval(play.timer);
  play.timer = 0;
  find("play").textContent = "Play";
}

function zoom(factor) { timeline.zoom(factor, Math.min(Math.max(state.cursor, timeline.from), timeline.to)); soon(); }
function fit() { timeline.move(0, timeline.end); soon(); }

// Closes what has been opened over or beside the pictures: the keys, what is written by hand, and the message.
function closePanels() {
  if (!find("keys").hidden) showKeys(false);
  find("studies").open = false;
  say("");
}

function showKeys(shown) {
  find("keys").hidden = !shown;
  find("help").setAttribute("aria-expanded", String(shown));
}

function onKey(event) {
  find("tip").hidden = true;  // what it tells may change with the key
  const { tagName, type } = event.target, typed = /^(TEXTAREA|SELECT)$/.test(tagName) || type === "number";
  if (event.key === "Escape") closePanels();
  if ((typed && event.key !== "Escape") || event.ctrlKey || event.metaKey || event.altKey || !state.trace) return;
  if (type === "range" && /^(Arrow|Home|End|Page)/.test(event.key)) return;  // which move the slider itself
  if (event.key === " " && /^(BUTTON|INPUT|SUMMARY)$/.test(tagName)) return;
  const far = event.shiftKey ? 10 : 1, wide = timeline.to - timeline.from;
  const keys = {
    ArrowRight: () => goTo(state.cursor + far), ArrowLeft: () => goTo(state.cursor - far), Home: () => goTo(0), End: () => goTo(state.trace.size - 1),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": fit,
    PageDown: () => { timeline.move(timeline.from + wide, timeline.to + wide); soon(); }, PageUp: () => { timeline.move(timeline.from - wide, timeline.to - wide); soon(); },
    l: () => { picked.layer = true; pickLayer(state.layer + 1 < state.trace.header.layers ? state.layer + 1 : -1); },
    b: nextLayout,
    p: play, Escape: () => { stopWriting(); stopPlaying(); }, " ": () => act(writing && writing.paused ? "resume" : "pause"),
  };
  const what = keys[event.key] || (event.shiftKey ? null : keys[event.key.toLowerCase()]);
  if (what) { event.preventDefault(); what(); }
}
