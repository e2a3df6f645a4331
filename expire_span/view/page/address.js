// What the address holds, and what a saved page restores.

// What the address holds: what was read, and whatever differs from what the page would choose by itself.
function addressOf() {
  const { trace, text } = state, whole = timeline.from <= 0 && timeline.to >= timeline.end, long = text != null && text.length > LONGEST_LINK;
  const place = { cursor: state.cursor < trace.size - 1 ? state.cursor : null, ...(whole || !trace.hasSpans ? {} : { from: timeline.from.toFixed(2), to: timeline.to.toFixed(2) }) };
  const seen = { layer: picked.layer ? state.layer : null, head: state.head < 0 ? null : state.head, layout: picked.layout ? state.layout : null };
  const read = !info.model ? {} : text === EXAMPLE ? { read: "example" } : text == null ? { read: "sample" } : long ? {} : { text };
  return toLink({ ...read, episode: info.agent ? find("number").value : null, ...seen, ...place, ...(long ? {} : comparisonAsked()) });
}

// Keeps the address up to date, so that loading the page again, or sending the address, shows the same.
function keepAddress() {
  clearTimeout(keepAddress.timer);
  keepAddress.timer = setTimeout(() => {
    if (!root.dataset.ready || !state.trace || writing || !/^(https?|file):$/.test(location.protocol)) return;
    const address = addressOf();
    if (address !== location.hash) history.replaceState(null, "", address);
  }, 4 * SETTLED);
}

// The settings that a saved page restores.
function chosen() {
  return { layer: state.layer, head: state.head, cursor: state.cursor, layout: state.layout, from: timeline.from.toFixed(2), to: timeline.to.toFixed(2) };
}

async function copyLink() {
  if (!state.trace) return say("there is nothing to link to yet");
  const long = state.text != null && state.text.length > LONGEST_LINK;
  history.replaceState(null, "", addressOf());
  await navigator.clipboard?.writeText(location.href).catch(() => {});
  say(long ? "the link holds the view, but not the text, which is too long for one" : "the address now opens this view, and was copied");
}
