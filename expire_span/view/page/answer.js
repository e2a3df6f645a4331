// The answer to "what if" in words with numbers, and pictures of both sides.

// The first and the last token (exclusive) of what was changed, widened to whole words.
function changedStretch(trace, front, back) {
  let from = front, to = trace.size - back;
  const first = wordsOf(trace)?.first;
  if (first && to > from) {
    while (from > 0 && first[from] >= 0 && first[from] < from) from--;
    while (to < trace.size && first[to] >= 0 && first[to] < to) to++;
  }
  return [from, to];
}

// For each layer, how many steps the longest-lived of some tokens stays.
function staysOf(trace, [from, to]) {
  return Array.from({ length: trace.header.layers }, (_, layer) => {
    const { death } = trace.choose(layer, -1);
    let longest = 0;
    for (let i = from; i < to; i++) longest = Math.max(longest, death[i] - i);
    return longest;
  });
}

// What was changed on both sides, with the steps that each stays in each layer; null where nothing was, or where tokens have no spans.
function findChange(before, after, front, back) {
  const sides = [before, after].map((trace) => ({ trace, place: changedStretch(trace, front, back) }));
  if (sides.some(({ trace, place }) => !trace.hasSpans || place[1] <= place[0])) return null;
  return sides.map(({ trace, place }) => ({ name: visible(shorten(textOf(trace, ...place))), stays: staysOf(trace, place) }));
}

// The layer that the user has chosen, or else the one in which the two differ most.
function telling([one, other], layer) {
  if (layer >= 0) return layer;
  const apart = one.stays.map((steps, n) => Math.abs(steps - other.stays[n]));
  return apart.indexOf(Math.max(...apart));
}

function staying(steps) { return steps < FOR_GOOD ? show(steps) : "for good"; }

function tellChange(change, layer) {
  const [one, other] = change, at = telling(change, layer), unit = one.stays[at] < FOR_GOOD ? count(one.stays[at], "step") : "for good";
  return [element("em", one.name), ` stays ${unit}, `, element("em", other.name), ` ${staying(other.stays[at])}`, ` (layer ${at + 1}${layer >= 0 || one.stays.length < 2 ? "" : ", where they differ most"}).`];
}

// What a limit or a budget costs and saves: memory at the end, bits, and the words that become harder to predict.
function tellLimit(before, after, cut, worse) {
  const [was, now] = [before, after].map(heldBytes), parts = [cut.max_span != null ? `no span above ${count(cut.max_span, "step")}` : "", cut.live != null ? `${show(cut.live)} memories alive in a layer on average` : ""];
  const bits = [before, after].map(meanBits), told = Number.isNaN(bits[0]) ? "" : `; a ${nounOf(after)} costs ${show(bits[1])} bits to predict instead of ${show(bits[0])}`;
  const hardest = worse.slice(0, 3).filter(([more]) => more >= WORSE).map(([more, j]) => [element("em", nameToken(after, j)), ` (+${show(more)} bits)`]);
  const list = hardest.flatMap((nodes, n) => [...(n ? [", "] : []), ...nodes]);
  return [`With ${parts.filter(Boolean).join(" and ")}, the model holds ${showBytes(now.held)} at the end instead of ${showBytes(was.held)}${told}. `, ...(list.length ? ["Hardest hit: ", ...list, "."] : [])];
}

// Two bars for each layer, as long as the changed words stay there.
function drawStays(svg, change) {
  const layers = Math.min(change[0].stays.length, 12), each = 34, wide = Math.max(svg.clientWidth, 260), high = layers * each + 22, left = 52, right = 60;
  const most = Math.max(1, ...change.flatMap(({ stays }) => stays.slice(0, layers).filter((x) => x < FOR_GOOD)));
  svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `steps that ${change[0].name} and ${change[1].name} stay in each layer`);
  svg.style.height = `${high}px`;
  const nodes = [svgNode("text", { x: 0, y: 12, "font-size": 11, fill: "currentColor" }, "steps that each stays, by layer")];
  for (let layer = 0; layer < layers; layer++) {
    const top = 22 + layer * each;
    nodes.push(svgNode("text", { x: 0, y: top + 18, "font-size": 11, fill: "currentColor" }, `layer ${layer + 1}`));
    change.forEach(({ name, stays }, n) => {
      const long = Math.min(stays[layer] / most, 1) * (wide - left - right), y = top + n * 14;
      nodes.push(svgNode("rect", { x: left, y, width: Math.max(long, 1), height: 12, rx: 2, fill: LINES[n] }));
      nodes.push(svgNode("text", { x: left + Math.max(long, 1) + 5, y: y + 10, "font-size": 11, fill: "currentColor" }, staying(stays[layer])));
    });
  }
  svg.replaceChildren(...nodes);
}

// Bytes held over time, before and after.
function drawHeld(svg, before, after) {
  const lines = [before, after].map((trace, n) => {
    const total = new Float64Array(trace.size);
    for (const column of trace.bytes) for (let i = 0; i < trace.size; i++) total[i] += column.data[i];
    return { name: n ? "after" : "before", points: thin(total, trace.size, 400), colour: LINES[n] };
  });
  drawChart(svg, lines, { size: Math.max(before.size, after.size), cursor: -1, format: showBytes, name: "bytes held before and after the change", axis: "bytes of living memories" });
}
