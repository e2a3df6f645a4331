// Requests to the server of this page. Traces arrive line by line and are drawn while they arrive.

const GONE = "is expire-span view still running?";

async function ask(path, body, signal) {
  const raw = body instanceof ArrayBuffer;
  const options = { method: "POST", signal, body: raw ? body : JSON.stringify(body || {}) };
  options.headers = { "content-type": raw ? "application/octet-stream" : "application/json" };
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(`the server does not answer; ${GONE}`);
  }
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || `the server answered ${answer.status}`);
  return answer;
}

// Calls `take` with each line of a streamed answer.
async function readLines(answer, take) {
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  let left = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error(`the server stopped before the end of its answer; ${GONE}`);
    });
    left += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const lines = left.split("\n");
    left = lines.pop();
    for (const line of lines) if (line) take(parseLine(line));
    if (done) return;
  }
}

function parseLine(line) {
  const value = JSON.parse(line);
  if (value.kind === "error") throw new Error(value.error);
  return value;
}

// Asks for a trace; `grown` is called after the header and from time to time while steps come.
async function fetchTrace(path, body, signal, grown = () => {}) {
  const answer = await ask(path, body, signal);
  let trace = null;
  await readLines(answer, (line) => {
    if (line.kind === "header") trace = new TraceData(line);
    else if (trace) trace.push(line);
    if (trace) grown(trace);
  });
  if (!trace) throw new Error("the server sent no trace");
  return trace;
}

// A text that the model is generating: its lines, and pause, step and resume.
class Writing {
  constructor(onLine, onEnd) { this.onLine = onLine; this.onEnd = onEnd; this.abort = new AbortController(); this.name = ""; this.paused = false; }

  async start(body) {
    try {
      const answer = await ask("api/generate", body, this.abort.signal);
      await readLines(answer, (line) => { if (line.kind === "session") this.name = line.name; else this.onLine(line); });
      this.onEnd("");
    } catch (error) {
      this.onEnd(error.name === "AbortError" ? "" : error.message);
    }
  }

  async act(action) {
    if (!this.name) return;
    this.paused = action !== "resume";
    if (action === "stop") { this.abort.abort(); return; }
    await ask(`api/generate/${this.name}/${action}`).catch((error) => this.onEnd(error.message));
  }
}
