// The timeline. Lines are quads in one WebGL2 buffer, panned and zoomed by uniforms; without WebGL2 they are plain rectangles; if there are too
// many, their density is drawn. Text, axes and the cursor are on a second canvas above.

const MOST_QUADS = 6000;
const RANKED = 500;  // milliseconds between two choices of labels during generation
const AXIS = 16;  // height in pixels of the axis of steps, below the rows
const CORNERS = 4;  // Vertices of a memory in the buffer. Instanced drawing would need one, but software renderers draw instances one by one.
const VERTEX = `#version 300 es
layout(location = 0) in vec4 life;  // birth, death, row, colour
uniform vec4 area;                  // first and last step, first and last row
uniform vec3 now;                   // cursor, pixels high, end of time
uniform sampler2D scale;
out vec3 seen;                      // step, death, strength
flat out vec3 tint;
void main() {
  int corner = gl_VertexID % 4;
  float step = corner % 2 == 0 ? life.x : min(life.y, now.z);
  float rows = area.w - area.z, thick = rows * 3.0 > now.y ? max(1.0, rows / now.y) : 0.84;
  float row = life.z + (corner < 2 ? 0.0 : thick);
  float alive = life.x <= now.x && now.x < life.y ? 1.0 : 0.0;
  seen = vec3(step, life.y, mix(0.6, 1.0, alive));
  tint = textureLod(scale, vec2(life.w * 0.996 + 0.002, 0.5), 0.0).rgb;
  gl_Position = vec4((step - area.x) / (area.y - area.x) * 2.0 - 1.0, 1.0 - (row - area.z) / rows * 2.0, 0.0, 1.0);
}`;
const FRAGMENT = `#version 300 es
precision highp float;
in vec3 seen;
flat in vec3 tint;
uniform float ramp;
out vec4 colour;
void main() {
  float strength = clamp((seen.y - seen.x) / ramp, 0.15, 1.0) * seen.z;
  colour = vec4(tint * strength, strength);
}`;

class Quads {
  constructor(canvas) {
    this.canvas = canvas;
    this.gl = canvas.getContext("webgl2", { antialias: false, premultipliedAlpha: true, preserveDrawingBuffer: true });
    if (this.gl) this.prepare();
  }

  // Whether WebGL2 is rendered in software, on the CPU: then plain rectangles are faster.
  get slow() {
    const known = this.gl && this.gl.getExtension("WEBGL_debug_renderer_info");
    return Boolean(known) && /swiftshader|llvmpipe|software/i.test(this.gl.getParameter(known.UNMASKED_RENDERER_WEBGL));
  }

  prepare() {
    const gl = this.gl, program = gl.createProgram();
    for (const [kind, source] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, source);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    if (!gl.getProgramParameter(program, gl.LINK_STATUS)) { this.gl = null; return; }
    gl.useProgram(program);
    this.places = Object.fromEntries(["area", "now", "ramp"].map((name) => [name, gl.getUniformLocation(program, name)]));
    this.buffer = gl.createBuffer();
    gl.bindBuffer(gl.ARRAY_BUFFER, this.buffer);
    gl.enableVertexAttribArray(0);
    gl.bindBuffer(gl.ELEMENT_ARRAY_BUFFER, gl.createBuffer());
    this.room = 0;
    gl.bindTexture(gl.TEXTURE_2D, gl.createTexture());
    gl.texParameteri(gl.TEXTURE_2D, gl.TEXTURE_MIN_FILTER, gl.LINEAR);
    gl.texParameteri(gl.TEXTURE_2D, gl.TEXTURE_WRAP_S, gl.CLAMP_TO_EDGE);
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
    this.paint();
  }

  paint() {
    if (!this.gl) return;
    const row = new Uint8Array(256 * 4);
    for (let n = 0; n < 256; n++) row.set([...colourAt(0.12 + 0.88 * n / 255), 255], 4 * n);
    this.gl.texImage2D(this.gl.TEXTURE_2D, 0, this.gl.RGBA, 256, 1, 0, this.gl.RGBA, this.gl.UNSIGNED_BYTE, row);
  }

  load(lives) {
    const gl = this.gl, count = lives.length / 4;
    if (!gl) return;
    const corners = new Float32Array(4 * CORNERS * count);
    for (let i = 0; i < count; i++) {
      for (let k = 0; k < CORNERS; k++) for (let n = 0; n < 4; n++) corners[16 * i + 4 * k + n] = lives[4 * i + n];
    }
    gl.bufferData(gl.ARRAY_BUFFER, corners, gl.DYNAMIC_DRAW);
    if (count > this.room) this.number(Math.max(2 * this.room, count));
  }

  // Vertex indices: two triangles for each memory. They do not depend on the trace.
  number(count) {
    const order = new Uint32Array(6 * count);
    for (let i = 0; i < count; i++) [0, 1, 2, 2, 1, 3].forEach((corner, n) => { order[6 * i + n] = CORNERS * i + corner; });
    this.gl.bufferData(this.gl.ELEMENT_ARRAY_BUFFER, order, this.gl.STATIC_DRAW);
    this.room = count;
  }

  clear(below) {
    if (!this.gl || (this.empty && !below)) return;
    this.empty = !below;  // an empty canvas need not be cleared again
    this.gl.viewport(0, below, this.canvas.width, Math.max(this.canvas.height - below, 1));
    this.gl.clearColor(0, 0, 0, 0);
    this.gl.clear(this.gl.COLOR_BUFFER_BIT);
  }

  draw(first, count, area, now, ramp, below) {
    const gl = this.gl;
    this.clear(below);
    gl.uniform4fv(this.places.area, area);
    gl.uniform3fv(this.places.now, now);
    gl.uniform1f(this.places.ramp, Math.max(ramp, 1e-3));
    gl.vertexAttribPointer(0, 4, gl.FLOAT, false, 16, 0);
    gl.drawElements(gl.TRIANGLES, 6 * count, gl.UNSIGNED_INT, 4 * 6 * first);
  }
}

class Timeline {
  constructor(stage, glCanvas, inkCanvas, wanted) {
    this.stage = stage;
    this.glCanvas = glCanvas;
    this.ink = inkCanvas;
    const none = { gl: null, load() {}, clear() {}, paint() {} }, quads = wanted === "off" ? none : new Quads(glCanvas);
    const slow = quads.slow && wanted !== "on";
    if (slow) quads.gl.getExtension("WEBGL_lose_context")?.loseContext();
    this.quads = slow ? none : quads;
    glCanvas.style.visibility = this.quads.gl ? "" : "hidden";  // a browser marks a canvas whose context is lost
    this.scratch = document.createElement("canvas");
    this.from = 0; this.to = 1; this.cursor = 0; this.count = 0;
    this.mode = "";
    this.mostQuads = MOST_QUADS;
  }

  // Takes span and death of each memory, the layout of rows, the name of the row axis, and a function that names a memory.
  // While the trace grows, labels are chosen anew only twice a second: ranking and measuring hundreds of words takes longer than a token.
  load({ span, death }, layout, range, ramp, end, rowName, nameOf, growing = false) {
    const now = performance.now(), stays = growing && now - this.rankedAt < RANKED;
    if (!stays) this.rankedAt = now;
    const n = death.length;
    Object.assign(this, { count: n, death, layout, ramp, end, rowName, nameOf, ranked: !nameOf ? [] : stays ? this.named : rankLives(death) });
    // Rows of what stays and rows of what goes, once the text is whole: while it grows, a line keeps its row.
    const long = growing ? Infinity : longLife(death), packed = layout !== "birth" ? packRows(death, growing ? 0 : mostHeld(death, long), long) : { rows: Float32Array.from(death, (_, i) => i), height: Math.max(n, 1) };
    this.rows = packed.rows; this.height = packed.height;
    this.lives = new Float32Array(4 * n);
    this.latest = new Int32Array(n);  // the latest death among all memories up to here; tells where drawing can begin
    for (let i = 0, last = 0; i < n; i++) {
      last = Math.max(last, death[i]);
      this.latest[i] = last;
      this.lives.set([i, death[i], this.rows[i], shareOf(span[i], range)], 4 * i);
    }
    this.quads.load(this.lives);
  }

  // The range of memories that may be visible in the window: born before its end, and not all dead before its beginning.
  range() {
    const last = Math.min(Math.max(Math.ceil(this.to), 0), this.count);
    return [Math.min(this.firstAlive(this.from - 1), last), last];
  }

  // The first memory that may be alive at a step or later: all before it are dead by then.
  firstAlive(step) {
    let low = 0, high = this.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.latest[middle] <= step) low = middle + 1; else high = middle;
    }
    return low;
  }

  area(first, last) {
    if (this.layout !== "birth") return [this.from, this.to, 0, this.height];
    return [this.from, this.to, first, Math.max(last, first + 1)];
  }

  draw() {
    const { ratio, wide, high: whole } = fitCanvas(this.ink), high = whole - AXIS, below = Math.round(AXIS * ratio);
    fitCanvas(this.glCanvas);
    const context = this.ink.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, wide, whole);
    if (!this.count) { this.quads.clear(0); return; }
    const [first, last] = this.range(), area = this.area(first, last);
    this.shown = { first, last, area, wide, high };
    const dense = last - first > this.mostQuads;
    this.mode = dense ? "density" : this.quads.gl ? "webgl2" : "2d";
    if (this.mode === "webgl2") {
      this.quads.draw(first, last - first, area, [this.cursor, this.glCanvas.height - below, this.end], this.ramp, below);
    } else {
      this.quads.clear(0);
      if (dense) this.drawDensity(context, first, last, area, wide, high);
      else this.drawPlain(context, first, last, area, wide, high);
    }
    this.drawAxes(context, area, wide, high);
    drawLabels(this, context);
  }

  drawPlain(context, first, last, area, wide, high) {
    const names = this.table().names, scaleX = wide / (area[1] - area[0]), scaleY = high / (area[3] - area[2]);
    for (const bar of this.bars(first, last)) {
      const x = Math.max((bar.birth - area[0]) * scaleX, -1), y = (bar.row - area[2]) * scaleY;
      const tall = scaleY < 3 ? Math.max(scaleY, 1) : 0.84 * scaleY, end = Math.min((bar.end - area[0]) * scaleX, wide + 1);
      const solid = Math.min(Math.max((bar.death - this.ramp - area[0]) * scaleX, x), end);
      context.globalAlpha = bar.alive ? 1 : 0.6;
      context.fillStyle = names[bar.shade];
      context.fillRect(x, y, solid - x, tall);
      context.globalAlpha *= 0.5;
      context.fillRect(solid, y, end - solid, tall);
    }
    context.globalAlpha = 1;
  }

  *bars(first, last) {
    for (let i = first; i < last; i++) {
      const death = this.death[i];
      if (death < this.from) continue;
      const shade = (255 * this.lives[4 * i + 3]) | 0;
      yield { birth: i, death, end: Math.min(death, this.end), row: this.rows[i], shade, alive: i <= this.cursor && this.cursor < death };
    }
  }

  // How much of each pixel is covered: +1 where a memory begins, -1 where it ends, then running sums. The cost does not
  // depend on how long memories live.
  drawDensity(context, first, last, area, wide, high) {
    const w = Math.ceil(wide), h = Math.ceil(high), [t0, t1, r0, r1] = area, lives = this.lives, end = this.end;
    if (!this.sums || this.sums.length !== (w + 1) * h) { this.sums = new Float32Array((w + 1) * h); this.tints = new Float32Array((w + 1) * h); }
    const sums = this.sums.fill(0), tints = this.tints.fill(0), scaleX = w / (t1 - t0), scaleY = h / (r1 - r0);
    for (let i = first; i < last; i++) {
      const at = 4 * i, death = Math.min(lives[at + 1], end);
      if (death < t0 || death <= lives[at]) continue;
      const y = Math.min(h - 1, ((lives[at + 2] - r0) * scaleY) | 0) * (w + 1);
      const x0 = lives[at] <= t0 ? 0 : ((lives[at] - t0) * scaleX) | 0;
      const x1 = Math.min(w, Math.max(x0 + 1, Math.ceil((death - t0) * scaleX))), tint = lives[at + 3];
      sums[y + x0] += 1; sums[y + x1] -= 1;
      tints[y + x0] += tint; tints[y + x1] -= tint;
    }
    if (!this.pixels || this.pixels.width !== w || this.pixels.height !== h) {
      this.pixels = new ImageData(w, h);
      this.scratch.width = w; this.scratch.height = h;
    }
    const out = new Uint32Array(this.pixels.data.buffer), full = Math.max((r1 - r0) / h, 1), table = this.table();
    for (let y = 0, p = 0; y < h; y++) {
      let sum = 0, tint = 0;
      for (let x = 0, at = y * (w + 1); x < w; x++, at++, p++) {
        sum += sums[at]; tint += tints[at];
        if (sum < 0.5) { out[p] = 0; continue; }
        const strength = 70 + 185 * Math.min(sum / full, 1), colour = table[Math.min(255, (255 * tint / sum) | 0)];
        out[p] = (strength << 24 | colour) >>> 0;
      }
    }
    if (w === this.ink.width) { context.putImageData(this.pixels, 0, 0); return; }  // one device pixel each
    this.scratch.getContext("2d").putImageData(this.pixels, 0, 0);
    context.drawImage(this.scratch, 0, 0, wide, high);
  }

  table() {
    if (this.dark !== dark || !this.colours) {
      this.dark = dark;
      const all = Array.from({ length: 256 }, (_, n) => colourAt(0.12 + 0.88 * n / 255));
      this.colours = Uint32Array.from(all, ([r, g, b]) => b << 16 | g << 8 | r);
      this.colours.names = all.map(css);
    }
    return this.colours;
  }

  drawAxes(context, area, wide, high) {
    const x = (step) => (step - area[0]) / (area[1] - area[0]) * wide;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = ink("soft");
    context.strokeStyle = ink("line");
    for (const { x: at, text } of this.steps(area, wide)) {
      context.fillRect(at, high, 1, 5);
      if (text) context.fillText(text, at + 3, high + 12);
    }
    context.fillText("step →", Math.max(wide - 40, 0), high + 12);
    context.fillStyle = ink("accent");
    context.fillRect(x(this.cursor + 0.5) - 1, 0, 2, high);
  }

  // Ticks of the axis of steps: their places, and the step as text where there is room.
  steps(area, wide) {
    const gap = niceStep((area[1] - area[0]) / Math.max(wide / 110, 2)), out = [];
    for (let t = Math.ceil(Math.max(area[0], 0) / gap) * gap; t <= area[1]; t += gap) {
      const x = (t - area[0]) / (area[1] - area[0]) * wide;
      out.push({ x, text: x < wide - 90 ? NUMBERS.format(t) : "" });
    }
    return out;
  }

  timeAt(x) { return this.from + x / this.stage.clientWidth * (this.to - this.from); }

  memoryAt(x, y) {
    if (!this.shown) return -1;
    const { first, last, area, high } = this.shown, t = this.timeAt(x);
    const row = area[2] + y / high * (area[3] - area[2]), reach = Math.max(1, 3 * (area[3] - area[2]) / high);
    let best = -1, nearest = reach;
    for (let i = first; i < last; i++) {
      if (i > t || this.death[i] <= t) continue;
      const away = Math.abs(this.rows[i] + 0.5 - row);
      if (away < nearest) { nearest = away; best = i; }
    }
    return best;
  }

  move(from, to) {
    const least = Math.min(8, Math.max(this.end, 1)), wide = Math.min(Math.max(to - from, least), Math.max(this.end, 1) * 1.02);
    from = Math.min(Math.max(from, 0), Math.max(this.end * 1.02 - wide, 0));
    this.from = from; this.to = from + wide;
  }

  zoom(factor, around) { this.move(around - (around - this.from) * factor, around + (this.to - around) * factor); }
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  return [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough) || 10 * power;
}
