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
  const node = element("button", visible(text));
  if (small) node.append(element("small", small));
  if (colour) { node.style.backgroundColor = css(colour); node.style.color = inkOn(colour); }
  node.addEventListener("click", onClick);
  return node;
}

// A token with a few of its neighbours: one byte alone says little.
function around(trace, i) {
  if (trace.header.vocabulary !== "bytes") return trace.text[i];
  const part = (from, to) => new TextDecoder().decode(Uint8Array.from(trace.token.slice(Math.max(from, 0), Math.max(to, 0))));
  return `${part(i - 8, i)}[${part(i, i + 1)}]${part(i + 1, i + 5)}`.replace(/\n/g, "⏎");
}

function kept(spans) {
  const longest = spans.reduce((a, b) => Math.max(a, b), 0);
  return longest < FOR_GOOD ? `for ${show(Math.round(longest))} steps` : "for good";
}

// What was changed, and how long either is kept: the longest span among its tokens.
function tellChange(traces, sides, front, back) {
  if (traces.some((trace) => trace.size - back <= front) || !wordsOf(traces[0])) return "";
  const parts = traces.map((trace, n) => {
    let from = front, to = trace.size - back;
    while (from > 0 && wordsOf(trace).first[from] >= 0 && wordsOf(trace).first[from] < from) from--;
    while (to < trace.size && wordsOf(trace).first[to] >= 0 && wordsOf(trace).first[to] < to) to++;
    const text = trace.header.vocabulary === "bytes" ? new TextDecoder().decode(Uint8Array.from(trace.token.slice(from, to))) : trace.text.slice(from, to).join("");
    return `“${visible(shorten(text))}” is kept ${kept(sides[n].span.subarray(from, to))}`;
  });
  return `${parts.join(", ")}.`;
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

function showComparison(before, after, layer, head, range, goTo) {
  const { pairs, front, back } = pairTokens(before, after);
  const first = back + front < after.size ? Math.max(front - WINDOW / 2, 0) : 0;  // where nothing was changed, the beginning
  const sides = [[find("old"), before], [find("new"), after]].map(([box, trace]) => {
    const choice = trace.hasSpans ? trace.choose(layer, head) : { span: null };
    const edge = trace.size - back;
    fillTokens(box, trace, choice.span, range, first, Math.min(first + WINDOW, trace.size), { changed: (i) => i >= front && i < edge });
    return choice;
  });
  const worse = [], moved = [];
  for (const [i, j] of pairs) {
    const more = after.bits.data[j] - before.bits.data[i];
    if (more > 0.05) worse.push([more, j]);
    if (sides[0].span && sides[1].span) {
      const change = sides[1].span[j] - sides[0].span[i];
      if (Math.abs(change) > 0.5) moved.push([change, j]);
    }
  }
  worse.sort((a, b) => b[0] - a[0]);
  moved.sort((a, b) => Math.abs(b[0]) - Math.abs(a[0]));
  const chips = (list) => list.slice(0, 40).map(([x, j]) => chip(around(after, j), (x > 0 ? "+" : "") + show(x), () => goTo(j)));
  find("worse").replaceChildren(...chips(worse));
  find("moved").replaceChildren(...chips(moved));
  if (!worse.length) find("worse").replaceChildren(element("span", "none", "es-soft"));
  if (!moved.length) find("moved").replaceChildren(element("span", "none", "es-soft"));
  find("changed").textContent = sides[0].span && sides[1].span ? tellChange([before, after], sides, front, back) : "";
  find("changed").hidden = !find("changed").textContent;
  find("sums").textContent = tellSums(before, after) + (Number.isNaN(meanBits(before)) ? "" : ` ${show(worse.length)} of ${show(pairs.length)} tokens that both have get worse.`);
  find("worse-box").hidden = Number.isNaN(meanBits(before));
  find("verdict").hidden = false;
}
