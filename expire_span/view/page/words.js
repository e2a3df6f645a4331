// Groups tokens that are bytes or pieces of words into words: readers look for names, not for single letters.

const LONGEST_WORD = 32;  // tokens; what is longer is no word, but a text without spaces
const MOST_WORDS = 20000;  // tokens of a text whose words get lines of their own; beyond, single words are thinner than a pixel

const isSpace = (text) => /^\s*$/.test(text);
const endsWord = (text) => !/[\p{L}\p{N}\ufffd]$/u.test(text);
const beginsWord = (text) => !/^[\p{L}\p{N}\ufffd]/u.test(text);

// For each token, the first token of its word; spaces belong to no word (-1), punctuation marks are words of their own.
function wordsOf(trace) {
  const { vocabulary } = trace.header;
  if (!["bytes", "pieces"].includes(vocabulary)) return null;
  const known = trace.words || (trace.words = { first: [], count: 0 }), { first } = known;
  for (let i = first.length; i < trace.size; i++) {
    const text = plainText(trace, i), before = i ? first[i - 1] : -1;
    const goesOn = before >= 0 && i - before < LONGEST_WORD && !beginsWord(text) && !endsWord(plainText(trace, i - 1));
    first.push(isSpace(text) ? -1 : goesOn ? before : i);
    if (first[i] === i) known.count++;
  }
  return known;
}

// The text of a token; bytes above 127 are parts of letters.
function plainText(trace, i) {
  if (trace.header.vocabulary !== "bytes") return trace.text[i];
  return trace.token[i] > 127 ? "\ufffd" : String.fromCharCode(trace.token[i]);
}

// Whether the page should begin with one line for each word.
function hasWords(trace) {
  const words = wordsOf(trace);
  return Boolean(words) && trace.size <= MOST_WORDS && words.count >= trace.size / 12;
}

// One line for each word, at its first token and as long as its longest-lived token; the lines of its other tokens are empty.
function joinWords(trace, { span, death }) {
  const { first } = wordsOf(trace), n = death.length, joined = { span: new Float32Array(n), death: Int32Array.from(death, (_, i) => i) };
  for (let i = 0; i < n; i++) {
    const at = first[i];
    if (at < 0) continue;
    joined.span[at] = Math.max(joined.span[at], span[i]);
    joined.death[at] = Math.max(joined.death[at], death[i]);
  }
  return joined;
}

function wordAt(trace, i) {
  const { first } = wordsOf(trace), from = first[i];
  if (from < 0) return trace.text[i];
  let to = i + 1;
  while (to < trace.size && first[to] === from) to++;
  if (trace.header.vocabulary !== "bytes") return trace.text.slice(from, to).join("").trim();
  return new TextDecoder().decode(Uint8Array.from(trace.token.slice(from, to)));
}
