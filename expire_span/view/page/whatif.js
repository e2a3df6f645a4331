// What if: two traces side by side. Tokens that both have are paired from the front and from the back of the text.

function pairTokens(before, after) {
  const most = Math.min(before.size, after.size);
  let front = 0, back = 0;
  while (front < most && before.token[front] === after.token[front]) front++;
  while (back < most - front && before.token[before.size - 1 - back] === after.token[after.size - 1 - back]) back++;
  const pairs = [];
  for (let i = 0; i < front; i++) pairs.push([i, i]);
  for (let k = back; k > 0; k--) pairs.push([before.size - k, after.size - k]);
  return { pairs, front, back };
}

function meanBits(trace) {
  let sum = 0, seen = 0;
  for (let i = 0; i < trace.size; i++) if (!Number.isNaN(trace.bits.data[i])) { sum += trace.bits.data[i]; seen++; }
  return seen ? sum / seen : NaN;
}

function mostAlive(trace) {
  let most = 0;
  for (let i = 0; i < trace.size; i++) most = Math.max(most, trace.live.reduce((sum, column) => sum + column.data[i], 0));
  return most;
}

function chip(text, small, onClick, colour) {
  const node = element("button");
  node.append(element("span", visible(text)));
  if (small) node.append(element("small", small));
  if (colour) { node.style.backgroundColor = css(colour); node.style.color = inkOn(colour); }
  node.addEventListener("click", onClick);
  return node;
}

// Fills a box with chips, or with the text `none`. Tab reaches one chip, and arrow keys move between them.
function fillChips(box, chips, none) {
  const held = box.contains(document.activeElement);
  chips.forEach((node, n) => { node.tabIndex = n ? -1 : 0; });
  box.replaceChildren(...(chips.length || !none ? chips : [element("span", none, "es-soft")]));
  if (held && chips.length) chips[0].focus({ preventScroll: true });
}

function walkChips(box, event) {
  const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key], all = [...box.querySelectorAll("button")];
  if (!by || !all.length) return;
  event.preventDefault();
  event.stopPropagation();  // elsewhere these keys move the cursor
  const from = all.indexOf(document.activeElement), to = Math.min(Math.max(from + by, 0), all.length - 1);
  all.forEach((node, n) => { node.tabIndex = n === to ? 0 : -1; });
  all[to].focus();
}

// The text of a stretch of tokens.
function textOf(trace, from, to) {
  const low = Math.max(from, 0), high = Math.min(Math.max(to, 0), trace.size);
  if (trace.header.vocabulary === "bytes") return new TextDecoder().decode(Uint8Array.from(trace.token.slice(low, high)));
  return trace.text.slice(low, high).join(trace.header.vocabulary === "pieces" ? "" : " ");
}

// The word of a token; a token that belongs to none, such as a space, is shown in brackets between the whole words beside it.
function nameToken(trace, i) {
  const words = wordsOf(trace);
  if (!words) return trace.text[i];
  if (/[\p{L}\p{N}]/u.test(wordAt(trace, i))) return wordAt(trace, i);
  let from = i, to = i + 1;
  while (from > 0 && words.first[from - 1] < 0) from--;
  while (to < trace.size && words.first[to] < 0) to++;
  if (from > 0) from = words.first[from - 1];
  if (to < trace.size) { const first = words.first[to]; while (to < trace.size && words.first[to] === first) to++; }
  return `${textOf(trace, from, i)}[${textOf(trace, i, i + 1)}]${textOf(trace, i + 1, to)}`.replace(/\n/g, "⏎");
}

// Combines changes of tokens into changes of words, which are easier to recognise; `join` combines two. Largest first.
function byWord(trace, changes, join) {
  const words = wordsOf(trace), found = new Map();
  for (const [change, i] of changes) {
    const at = words && words.first[i] >= 0 ? words.first[i] : i;
    found.set(at, found.has(at) ? join(found.get(at), change) : change);
  }
  return Array.from(found, ([at, change]) => [change, at]).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0]));
}

// Mean bits of the answers that a task asks for, the return of an episode and how it ended, where there are such.
function meanAnswer(trace) {
  const asked = trace.lines.filter((line) => line.answer);
  return asked.length ? asked.reduce((sum, line) => sum + line.answer.bits, 0) / asked.length : NaN;
}

function sumReward(trace) { return trace.header.task === "env" ? trace.lines.reduce((sum, line) => sum + (line.reward || 0), 0) : NaN; }

function tellEnd(trace) {
  const last = trace.step(trace.size - 1);
  return last.success == null ? "" : last.success ? " (solved)" : " (failed)";
}

function tellSums(before, after) {
  const tell = (name, of, end = () => "") => Number.isNaN(of(before)) || Number.isNaN(of(after)) ? [] : [`${name} ${show(of(before))}${end(before)} → ${show(of(after))}${end(after)}`];
  const parts = [...tell("bits per token, lower is better:", meanBits), ...tell("bits per answer, lower is better:", meanAnswer), ...tell("return:", sumReward, tellEnd),
    ...tell("most memories alive at once, all layers:", mostAlive)].join("; ");
  return `${parts.charAt(0).toUpperCase()}${parts.slice(1)}.`;
}

// The heading of the changed side, with the limits that were set.
function tellCut({ max_span: limit, live }) {
  return ["after", ...(limit == null ? [] : [`no span above ${show(limit)} steps`]), ...(live == null ? [] : [`${show(live)} memories alive in a layer, on average`])].join(", ");
}

const WORSE = 0.5;  // bits from which a token is marked

function showComparison(before, after, { layer, head, told }, cut, goTo) {
  find("verdict").hidden = false;  // pictures are drawn as wide as the page shows them
  const { pairs, front, back } = pairTokens(before, after), sides = [before, after].map((trace) => trace.hasSpans ? trace.choose(layer, head) : { span: null });
  const bits = [], spans = [], more = new Float32Array(after.size);
  for (const [i, j] of pairs) {
    more[j] = after.bits.data[j] - before.bits.data[i] || 0;
    bits.push([more[j], j]);
    if (sides[0].span && sides[1].span) spans.push([sides[1].span[j] - sides[0].span[i], j]);
  }
  const shades = rangeOf(sides[0].span || []), first = back + front < after.size ? Math.max(front - WINDOW / 2, 0) : 0;  // where nothing was changed, the beginning
  [[find("old"), before], [find("new"), after]].forEach(([box, trace], n) => {
    const changed = (i) => i >= front && i < trace.size - back;
    fillTokens(box, trace, sides[n].span, shades, first, Math.min(first + WINDOW, trace.size), { changed, worse: n ? (i) => more[i] >= WORSE : null });
  });
  const chips = (list) => list.slice(0, 40).map(([x, j]) => {
    const node = chip(nameToken(after, j), (x > 0 ? "+" : "") + show(x), () => goTo(j));
    node.title = `step ${show(j)}: …${textOf(after, j - 24, j + 32).replace(/\s+/g, " ")}…`;
    return node;
  });
  const worse = bits.filter(([x]) => x > 0.05), scored = !Number.isNaN(meanBits(before));
  fillChips(find("moved"), chips(byWord(after, spans, (a, b) => Math.abs(b) > Math.abs(a) ? b : a).filter(([x]) => Math.abs(x) > 0.5)), "none");
  const change = findChange(before, after, front, back), words = byWord(after, bits, (a, b) => a + b).filter(([x]) => x > 0.05), asked = cut.max_span != null || cut.live != null;
  const answer = [...(change ? tellChange(change, told) : []), ...(change && asked ? [" "] : []), ...(asked ? tellLimit(before, after, cut, words) : [])];
  fillChips(find("worse"), chips(words), "none");
  find("changed").replaceChildren(...answer);
  find("changed").hidden = !answer.length;
  find("both-box").hidden = !change;
  if (change) { drawStays(find("both"), change); find("both-first").textContent = `before: ${change[0].name}`; find("both-second").textContent = `after: ${change[1].name}`; }
  drawHeld(find("both-held"), before, after);
  find("sums").textContent = tellSums(before, after) + (scored ? ` ${show(worse.length)} of the ${count(pairs.length, "token")} that both texts share become harder to predict.` : "");
  find("after-title").textContent = tellCut(cut);
  find("worse-box").hidden = find("wavy").hidden = !scored;
  find("moved-box").hidden = !spans.length;
  find("straight").hidden = pairs.length === before.size && pairs.length === after.size;
}
