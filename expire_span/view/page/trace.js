// A trace in columns: growing typed arrays, which stay small and fast for a hundred thousand memories.

const VERSION = 2;

class Column {
  constructor(Kind) { this.Kind = Kind; this.data = new Kind(1024); this.size = 0; }
  push(value) {
    if (this.size === this.data.length) {
      const larger = new this.Kind(2 * this.size);
      larger.set(this.data);
      this.data = larger;
    }
    this.data[this.size++] = value;
  }
}

class TraceData {
  constructor(header) {
    if (header.kind !== "header") throw new Error("this is not a trace: its first line is no header");
    if (header.version !== VERSION) {
      throw new Error(`the trace has version ${header.version}, this page reads version ${VERSION}; write it again with: expire-span trace`);
    }
    this.header = header;
    this.lines = [header];
    const lanes = header.layers * header.heads;
    this.spans = Array.from({ length: lanes }, () => new Column(Float32Array));
    this.deaths = Array.from({ length: lanes }, () => new Column(Int32Array));
    this.live = Array.from({ length: header.layers }, () => new Column(Float32Array));
    this.bytes = Array.from({ length: header.layers }, () => new Column(Float64Array));
    this.bits = new Column(Float32Array);
    this.text = [];
    this.token = [];
    this.revision = 0;
  }

  get size() { return this.bits.size; }
  get hasSpans() { return this.header.memory_bytes != null; }
  get hasHidden() { return this.lines.length > 1 && Boolean(this.lines[1].hidden); }
  step(i) { return this.lines[i + 1]; }

  push(step) {
    const { heads } = this.header, i = this.size;
    if (step.kind !== "step" || step.i !== i) throw new Error(`the trace is broken: step ${i} is missing`);
    if (step.spans && !step.dies) throw new Error(`the trace is broken: step ${i} does not say when its memories die`);
    this.lines.push(step);
    this.text.push(String(step.text));
    this.token.push(step.token);
    this.bits.push(step.bits ?? NaN);
    step.live.forEach((x, n) => this.live[n].push(x));
    step.bytes.forEach((x, n) => this.bytes[n].push(x));
    if (step.spans) {
      step.spans.forEach((row, layer) => row.forEach((span, head) => {
        this.spans[layer * heads + head].push(span);
        this.deaths[layer * heads + head].push(step.dies[layer][head]);
      }));
      for (const [layer, head, birth] of step.deaths) this.deaths[layer * heads + head].data[birth] = i;
    }
    this.revision++;
  }

  // Span and death of every memory in a choice of layer (-1: all) and head (-1: the longest).
  choose(layer, head) {
    const { layers, heads } = this.header, n = this.size;
    const span = new Float32Array(n), death = new Int32Array(n);
    const from = layer < 0 ? 0 : layer, to = layer < 0 ? layers : layer + 1;
    for (let l = from; l < to; l++) {
      for (let i = 0; i < n; i++) {
        let longest = -Infinity, last = 0;
        for (let h = head < 0 ? 0 : head; h < (head < 0 ? heads : head + 1); h++) {
          const lane = l * heads + h;
          longest = Math.max(longest, this.spans[lane].data[i]);
          last = Math.max(last, this.deaths[lane].data[i]);
        }
        span[i] += longest / (to - from);
        death[i] = Math.max(death[i], last);
      }
    }
    return { span, death };
  }
}

// Gives each memory a free row, so that no two overlap: the height of the picture is the largest number of memories held at once. `upper` rows
// are for the memories of a `long` life as far as there are free ones, the rows below for the others: what stays is above what goes.
function packRows(death, upper = 0, long = Infinity) {
  const n = death.length, rows = new Float32Array(n), ends = new Heap(), above = new Heap(), below = new Heap(), height = mostHeld(death);
  const release = (row) => (row < upper ? above : below).push(row);
  for (let row = 0; row < height; row++) release(row);
  for (let i = 0; i < n; i++) {
    while (ends.size && ends.least() <= i) release(ends.pop());
    if (death[i] <= i) continue;  // never held
    const [first, other] = death[i] - i >= long ? [above, below] : [below, above];
    const row = first.size ? first.pop() : other.pop();
    rows[i] = row;
    ends.push(row, death[i]);
  }
  return { rows, height: Math.max(height, 1) };
}

// The largest number of memories held at once, of those that live for `least` steps or more.
function mostHeld(death, least = 1) {
  const n = death.length, change = new Int32Array(n + 1);
  for (let i = 0; i < n; i++) if (death[i] - i >= least) { change[i]++; change[Math.min(death[i], n)]--; }
  let held = 0, most = 0;
  for (let i = 0; i < n; i++) { held += change[i]; most = Math.max(most, held); }
  return most;
}

// From how many steps on a life is a long one: twice the median of those that are held at all.
function longLife(death) {
  const lives = Float64Array.from(death, (end, i) => end - i).filter((x) => x > 0).sort();
  return lives.length ? 2 * lives[lives.length >> 1] : Infinity;
}

// A binary heap of numbers. Free rows are ordered by themselves, rows in use by the step at which they become free.
class Heap {
  constructor() { this.items = []; this.keys = []; }
  get size() { return this.items.length; }
  least() { return this.keys[0]; }
  push(item, key = item) {
    let at = this.items.length;
    this.items.push(item); this.keys.push(key);
    while (at > 0) {
      const up = (at - 1) >> 1;
      if (this.keys[up] <= this.keys[at]) break;
      this.swap(at, up); at = up;
    }
  }
  pop() {
    const item = this.items[0], last = this.items.length - 1;
    this.swap(0, last); this.items.pop(); this.keys.pop();
    let at = 0;
    for (;;) {
      const left = 2 * at + 1, right = left + 1;
      let least = at;
      if (left < last && this.keys[left] < this.keys[least]) least = left;
      if (right < last && this.keys[right] < this.keys[least]) least = right;
      if (least === at) return item;
      this.swap(at, least); at = least;
    }
  }
  swap(a, b) {
    [this.items[a], this.items[b]] = [this.items[b], this.items[a]];
    [this.keys[a], this.keys[b]] = [this.keys[b], this.keys[a]];
  }
}

// Number of tokens of the character that begins with a token: by its first byte where tokens are bytes, else one.
function charBytes(trace, i) {
  const byte = trace.header.vocabulary === "bytes" ? trace.token[i] : 0;
  return byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
}

// Pieces of text to show: the bytes of one character belong together; words and symbols stand alone.
function cellsOf(trace, from, to) {
  const cells = [];
  if (trace.header.vocabulary !== "bytes") {
    for (let i = from; i < to; i++) cells.push({ start: i, end: i + 1, text: trace.text[i] });
    return cells;
  }
  const decoder = new TextDecoder("utf-8", { fatal: true });
  for (let i = from; i < to;) {
    const byte = trace.token[i];
    let width = Math.min(charBytes(trace, i), trace.size - i), text;
    try {
      text = decoder.decode(Uint8Array.from(trace.token.slice(i, i + width)));
      if (text === "" || (byte < 32 && byte !== 9 && byte !== 10) || byte === 127) throw new RangeError("not to be shown");
    } catch {
      width = 1; text = trace.text[i];
    }
    cells.push({ start: i, end: i + width, text });
    i += width;
  }
  return cells;
}

// The text as it was read, for the fields in which it can be changed.
function wholeText(trace) {
  if (trace.header.vocabulary === "bytes") return new TextDecoder().decode(Uint8Array.from(trace.token));
  return trace.text.join(trace.header.vocabulary === "pieces" ? "" : " ");
}

function parseLines(text) {
  const [first, ...rest] = text.split("\n").filter((line) => line);
  const trace = new TraceData(JSON.parse(first || "{}"));
  for (const line of rest) trace.push(JSON.parse(line));
  return trace;
}

async function unpackTrace(packed) {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return parseLines(await new Response(stream).text());
}

async function packLines(lines) {
  const text = lines.map((line) => JSON.stringify(line) + "\n").join("");
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  let out = "";
  for (let i = 0; i < bytes.length; i += 32768) out += String.fromCharCode(...bytes.subarray(i, i + 32768));
  return btoa(out);
}
