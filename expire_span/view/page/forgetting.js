// Where a trace shows forgetting best, and what it holds instead of what, in words.

const VISIBLE = [0.3, 0.9];  // fraction of the drawn lines that die within the drawn time, for which both stay and go are seen
const FAR = 4;  // how many times the median life some lines must last to stand out

// The lines of a view: when each begins and ends. Words have one line each, other tokens one each; lines of no length are not drawn.
function drawnLives(trace, layer, layout, head = -1) {
  const chosen = trace.choose(layer, head), { death } = layout === "words" ? joinWords(trace, chosen) : chosen, lives = [];
  let died = 0;
  for (let i = 0; i < death.length; i++) {
    if (death[i] <= i) continue;
    lives.push(death[i] - i);
    if (death[i] < trace.size) died++;
  }
  return { lives: Float64Array.from(lives).sort(), died: lives.length ? died / lives.length : 0 };
}

// How well a view shows forgetting: fraction that dies, how far the longest lives are from the median one, and whether both can be seen.
function judgeView(trace, layer, layout) {
  const { lives, died } = drawnLives(trace, layer, layout), at = (part) => lives[Math.floor(part * (lives.length - 1))] || 1;
  const seen = died >= VISIBLE[0] && died <= VISIBLE[1] && at(1) >= FAR * at(0.5);
  const balance = Math.min(1, died / VISIBLE[0], (1 - died) / (1 - VISIBLE[1]));
  return { layer, layout, died, seen, score: balance * Math.log(Math.max(at(0.95) / at(0.5), 1)) };
}

// The layer and the kind of lines in which this trace shows forgetting best: those that show it at all, of these words, of these the widest gap.
function bestView(trace) {
  const layouts = hasWords(trace) ? ["words", "packed"] : ["packed"], views = [];
  for (let layer = 0; layer < trace.header.layers; layer++) for (const layout of layouts) views.push(judgeView(trace, layer, layout));
  const rank = (view) => 100 * view.seen + 10 * (view.layout === "words") + Math.min(view.score, 9);
  return views.reduce((best, view) => rank(view) > rank(best) ? view : best);
}

const NOUNS = { bytes: "byte", words: "word" };

function nounOf({ header }) { return header.task === "env" ? "step" : NOUNS[header.vocabulary] || "token"; }
function whoOf({ header }) { return header.task === "env" ? "agent" : "model"; }

// Bytes of what is held at the end, and what a model that never forgets would hold by then.
function heldBytes(trace) {
  const held = trace.bytes.reduce((sum, column) => sum + column.data[trace.size - 1], 0);
  return { held, full: trace.size * trace.header.layers * trace.header.full_bytes };
}

// One sentence: what is held instead of what.
function tellHeld(trace) {
  const { held, full } = heldBytes(trace), when = `After ${count(trace.size, nounOf(trace))}, this ${whoOf(trace)}`;
  if (!trace.hasSpans) {
    if (held >= full) return `${when} holds ${showBytes(held)}; attention that never forgets would hold ${showBytes(full)}.`;
    return `${when} holds ${showBytes(held)} in its state instead of the ${showBytes(full)} of attention that never forgets.`;
  }
  if (held >= full) return `${when} still holds all ${showBytes(held)} of its memories: nothing has expired yet.`;
  return `${when} holds ${showBytes(held)} instead of ${showBytes(full)}: ${tellPart(1 - held / full)} of its memories have expired and are deleted.`;
}

function tellPart(part) { return part < 0.1 || part > 0.99 ? `${(100 * part).toFixed(1)}%` : `${Math.round(100 * part)}%`; }

// Which lines last longest and which end first, each name once; only names with a letter or a digit say something.
function extremesOf(trace, { death }, nameOf, most = 5) {
  const order = rankLives(death), longest = [], shortest = [];
  const take = (out, i, others) => {
    const name = nameOf(i);
    if (out.length < most && /[\p{L}\p{N}]/u.test(name) && name.length <= LONGEST_LABEL && !out.includes(name) && !others.includes(name)) out.push(name);
  };
  for (let n = 0; n < order.length && longest.length < most; n++) take(longest, order[n], []);
  for (let n = order.length - 1; n >= 0 && shortest.length < most; n--) if (death[order[n]] < trace.size) take(shortest, order[n], longest);
  return { longest, shortest };
}

function titleOf({ header, hasSpans }) {
  const who = header.task === "env" ? "an agent" : ["symbols"].includes(header.vocabulary) ? "a model" : "a language model";
  return hasSpans || !state.trace.size ? `What ${who} keeps in memory, and what it forgets` : `What ${who} holds in memory`;
}

function introOf(trace) {
  const { header } = trace, when = header.task === "env" ? "it sees something" : `it reads a ${nounOf(trace)}`;
  return `When ${when} it decides for how many steps to keep that in memory: its span. Then the memory fades and is deleted for good. `;
}
const SHADES = { light: "Dark lines are kept long, pale ones are soon forgotten.", dark: "Bright lines are kept long, dim ones are soon forgotten." };
const PLAIN_INTRO = "This model gives its memories no span of their own. What it holds on to, step by step, is shown below.";

// What is held instead of what, and examples of what stays and what goes in the lines that are drawn.
function drawHeadline() {
  const { trace } = state, named = trace.hasSpans && timeline.nameOf && lines.death;
  find("headline").textContent = tellHeld(trace);
  const { longest, shortest } = named ? extremesOf(trace, lines, timeline.nameOf) : { longest: [], shortest: [] };
  find("extremes").hidden = !longest.length || !shortest.length;
  find("stay").replaceChildren(...longest.map((name) => element("b", name)));
  find("go").replaceChildren(...shortest.map((name) => element("s", name)));
}

function setTrace(trace, keep) {
  state.trace = trace;
  const { header } = trace;
  find("title").textContent = titleOf(trace);
  find("name").textContent = header.name || "a model";
  find("about").textContent = `${header.about || ""} Memory system: ${header.system}, ${count(header.layers, "layer")}` +
    (header.heads > 1 ? `, each with ${show(header.heads)} heads that forget on their own` : "") +
    (header.max_span ? `, spans of up to ${count(header.max_span, "step")}, fading over ${show(header.ramp)} more (the ramp).` : ".");
  find("layer").max = header.layers;
  find("layer-box").hidden = header.layers < 2;
  find("layer").min = trace.hasSpans ? 0 : 1;
  if (header.episode != null) find("number").value = header.episode;
  find("head-box").hidden = header.heads < 2;
  find("head-pick").replaceChildren(new Option("longest of all", "-1"), ...Array.from({ length: header.heads }, (_, n) => new Option(n + 1, n)));
  if (!keep) { goToEnd(trace); timeline.from = 0; timeline.to = 0; timeline.end = 0; forgetComparison(); }
  if (!keep) settleLayer();
  pickLayer(Math.min(state.layer, header.layers - 1));
  find("pictures").hidden = false;
}
