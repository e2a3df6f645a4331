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

function showComparison(before, after, layer, head, range, goTo) {
  const { pairs, front, back } = pairTokens(before, after);
  const first = Math.max(front - WINDOW / 2, 0);
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
  find("sums").textContent = `Bits per token ${show(meanBits(before))} → ${show(meanBits(after))} (lower is better); most memories alive at once ` +
    `${show(mostAlive(before))} → ${show(mostAlive(after))}. ${worse.length} of ${pairs.length} tokens that both texts share get worse.`;
  find("verdict").hidden = false;
}
