// Colour scales whose lightness alone gives the order, so that they can be read with any kind of colour blindness; and helpers of the page.

const find = (id) => document.getElementById("es-" + id);
const SCALES = {
  light: [[236, 242, 250], [158, 200, 236], [70, 140, 205], [22, 84, 160], [8, 40, 92]],
  dark: [[34, 46, 64], [36, 84, 124], [52, 140, 176], [150, 200, 150], [255, 226, 140]],
};
// Okabe and Ito's palette, safe for colour blindness. Layers take the colours in turn; from the ninth layer on, lines are dashed.
const LINES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a7a00", "#7a7a7a"];
const MARGIN = 18;
const darkMode = matchMedia("(prefers-color-scheme: dark)");
let dark = darkMode.matches;  // kept, since asking the browser takes longer than computing a colour
darkMode.addEventListener("change", () => { dark = darkMode.matches; });
const NUMBERS = new Intl.NumberFormat("en");  // the same format as toLocaleString("en"), which would set it up for every number

function scaleColours() { return SCALES[dark ? "dark" : "light"]; }

function colourAt(share) {
  const stops = scaleColours(), place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2), part = place - low;
  return stops[low].map((x, n) => Math.round(x + (stops[low + 1][n] - x) * part));
}

function css(colour) { return `rgb(${colour[0]} ${colour[1]} ${colour[2]})`; }

// The colour that results when `colour` is drawn over the card with opacity `share`.
function over(colour, share) { const card = dark ? [24, 30, 39] : [255, 255, 255]; return colour.map((x, n) => x * share + card[n] * (1 - share)); }

// Relative luminance of a colour, from 0 to 1, as the Web Content Accessibility Guidelines define it.
function luminance(colour) {
  const [r, g, b] = colour.map((x) => x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// Black or white, whichever has more contrast with a colour: of the two, one always has at least 4.58, the square root of 21.
function inkOn(colour) { return luminance(colour) > Math.sqrt(1.05 * 0.05) - 0.05 ? "#000000" : "#ffffff"; }

// Where a span lies between the shortest and the longest of a range, on a logarithmic scale.
function shareOf(span, range) {
  const [low, high] = range.map((x) => Math.log1p(Math.max(x, 0))), at = Math.log1p(Math.max(span, 0));
  return high - low < 1e-6 ? 0.6 : Math.min(Math.max((at - low) / (high - low), 0), 1);
}

// The range of the colour scale: from the first percentile of the spans to the longest one, which counts even if it is the only one of
// its length, since it is what was kept. Its lower end is at most half of its upper end, so that nearly equal spans look nearly equal.
function rangeOf(spans) {
  const sorted = Float32Array.from(spans).filter((x) => x < FOR_GOOD).sort(), last = sorted.length - 1;
  return last < 0 ? [0, 1] : [Math.min(sorted[Math.floor(0.01 * last)], sorted[last] / 2), sorted[last]];
}

function ink(name) { return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim(); }

function show(number) {
  if (number == null || Number.isNaN(number)) return "—";
  if (Number.isInteger(number)) return NUMBERS.format(number);
  return Math.abs(number) >= 100 ? NUMBERS.format(Math.round(number)) : number.toPrecision(3);
}

// Spans from here on mean "never deleted", as for the first few tokens that a retrofit keeps; they are no lengths of time.
const FOR_GOOD = 1e7;

function showLeft(steps) { return steps < FOR_GOOD ? show(steps) : "for good"; }

function showBytes(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 999.5 || unit === "GB") return `${count.toFixed(unit === "B" || count >= 99.95 ? 0 : count >= 9.995 ? 1 : 2)} ${unit}`;
    count /= 1000;
  }
}

// Sets a canvas's resolution to its size on the page in device pixels; the pixel ratio is capped at two.
function fitCanvas(canvas, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  if (height) canvas.style.height = height + "px";
  const box = canvas.getBoundingClientRect();
  const wide = Math.max(Math.round(box.width * ratio), 1), high = Math.max(Math.round((height || box.height) * ratio), 1);
  if (canvas.width !== wide || canvas.height !== high) { canvas.width = wide; canvas.height = high; }
  return { ratio, wide: wide / ratio, high: high / ratio };
}

function element(name, text, className) {
  const node = document.createElement(name);
  if (text != null) node.textContent = text;
  if (className) node.className = className;
  return node;
}

// A number with what is counted: "1 word", "2 words".
function count(number, noun) { return `${show(number)} ${number === 1 ? noun : noun.endsWith("y") ? noun.slice(0, -1) + "ies" : noun + "s"}`; }

// Characters that turn the direction of everything after them, or have no width, are written as their numbers: what is shown stays in the
// order in which the model read it.
function escapeControls(text) { return text.replace(/[\u061c\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0")); }

// The same, and spaces and line ends that stand alone as signs, since they would not be seen.
function visible(text) { return escapeControls(text).replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +$/g, (x) => "␣".repeat(x.length)); }
