"use strict";
// The canvas of blocks, its legend, and the marks on what has just happened to a block.
// The first of the three scripts, which share their names.
const $ = (id) => document.getElementById(id);
// Okabe and Ito: distinguishable for colour-blind people. Held by one: orange; by two … eight and more: vermilion, ever darker.
const STATES = ["#ffffff", "#56b4e9", "#f0e442", "#e69f00", "#d55e00", "#c95800", "#bd5200", "#b04b00", "#a34500", "#973e00", "#8b3700"];
// In the dark, free cells are nearly black, and what lies between cells is darker than they are in the light.
const DARK_FREE = "#101010", GAPS = ["#bbbbbb", "#444444"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const NAMES = { 0: "free", 1: "cached", 2: "pinned", 3: "active", 4: "shared by 2 to 7", 10: "shared by 8 or more" };
const TENANTS = ["#4d4d4d", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"];
const MOST_NAMED = 24; // tenants in the legend
// Milliseconds for which an outline, a cross and an arrow stay.
const FLASH = 400, CROSS = 1000, ARROW = 3000;
let flash = new Map(), crosses = new Map(), arrows = [], ofChosen = new Set();
let chosen = 1, wanted = false, focus = false, again = null;

function nameOf(code) { return code < 4 ? NAMES[code] : code < 10 ? `shared by ${code - 2}` : NAMES[10]; }

// Cells are written as pixels, and only those whose colour has changed: 100,000 of them take a millisecond or two.
// Blocks behind the last that was ever used are not drawn: a large cache would be a stripe over an empty rectangle.
const FEWEST_DRAWN = 128;
let columns = 1, cell = 8, image = null, pixels = null, painted = null, laidOut = 0, drawn = 0;
function layOut() {
  const canvas = $("blocks"), width = canvas.clientWidth || 1000, count = drawn || Math.min(FEWEST_DRAWN, spec.num_blocks - 1);
  drawn = count;
  laidOut = width;
  // As large as all fit into about 480 pixels of height.
  cell = Math.max(2, Math.min(26, Math.floor(Math.sqrt((width * 480) / Math.max(1, count)))));
  columns = Math.max(1, Math.floor(width / cell));
  canvas.width = columns * cell;
  canvas.height = Math.ceil(count / columns) * cell;
  canvas.style.height = canvas.height * (width / canvas.width) + "px";
  image = canvas.getContext("2d").createImageData(canvas.width, canvas.height);
  pixels = new Uint32Array(image.data.buffer);
  // Gaps lie between cells; behind the last one is nothing.
  const gap = pixelOf(GAPS[+dark.matches]), whole = Math.floor(count / columns) * cell * image.width;
  pixels.fill(gap, 0, whole);
  for (let row = whole; row < pixels.length; row += image.width) pixels.fill(gap, row, row + (count % columns) * cell);
  painted = new Uint32Array(count + 1);
}
function pixelOf(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
}
const STATE_PIXELS = STATES.map(pixelOf), TENANT_PIXELS = TENANTS.map(pixelOf), WHITE = pixelOf("#ffffff"), BLACK = pixelOf("#000000");
// Draw at least up to this block; by doubling, so that cells seldom change their places.
function reach(block) {
  if (block <= drawn) return;
  let count = Math.max(FEWEST_DRAWN, drawn);
  while (count < block) count *= 2;
  drawn = Math.min(count, spec.num_blocks - 1);
  layOut();
}
function freeColour() { return dark.matches ? DARK_FREE : STATES[0]; }
function colourOf(block) {
  const code = codes[block];
  if (!code) return freeColour();
  return $("colour").value === "state" ? STATES[code] : TENANTS[owners[block] % TENANTS.length];
}
// What can be read on a colour.
const inks = new Map();
function inkOn(colour) {
  if (!inks.has(colour)) {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    inks.set(colour, 0.3 * red + 0.6 * green + 0.1 * blue < 120 ? "#ffffff" : "#000000");
  }
  return inks.get(colour);
}
function fill(block, pixel) {
  painted[block] = pixel;
  const at = block - 1, size = cell - (cell > 4 ? 1 : 0), width = image.width;
  const first = Math.floor(at / columns) * cell * width + (at % columns) * cell;
  for (let row = first, end = first + size * width; row < end; row += width)
    for (let i = row; i < row + size; i++) pixels[i] = pixel;
}
function draw() { if (!wanted) { wanted = true; requestAnimationFrame(paint); } }
function paint() {
  wanted = false;
  if (!spec) return;
  const byState = $("colour").value === "state", free = pixelOf(freeColour());
  const tally = [0, 0, 0, 0];
  let last = 0;
  for (let block = 1; block < codes.length; block++) {
    tally[codes[block] < 3 ? codes[block] : 3]++;
    if (codes[block]) last = block;
  }
  reach(last);
  for (let block = 1; block <= Math.min(drawn, codes.length - 1); block++) {
    const code = codes[block];
    const pixel = code === 0 ? free : byState ? STATE_PIXELS[code] : TENANT_PIXELS[owners[block] % TENANTS.length];
    if (painted[block] !== pixel) fill(block, pixel);
  }
  mark(performance.now());
  const bytes = (count) => {
    const mebibytes = (count * spec.block_bytes) / 2 ** 20;
    return mebibytes < 10_000 ? show(mebibytes, 1) + " MiB" : show(mebibytes / 1024, 1) + " GiB";
  };
  $("usage").textContent = `${show(tally[3])} active (${bytes(tally[3])}), ${show(tally[1])} cached, ${show(tally[2])} pinned, `
    + `${show(tally[0])} free` + (spec.host_blocks ? `; host memory: ${show(counters[3])} of ${show(spec.host_blocks)} blocks` : "")
    + tiers.map(([name, open, stored, loaded]) => `; ${name}: ${show(stored)} blocks written, ${show(loaded)} read`
      + (open ? "" : " (closed after errors)")).join("")
    + (drawn < spec.num_blocks - 1 ? `. Not drawn: ${show(spec.num_blocks - 1 - drawn)} more that are free.` : "");
  legend();
  colourTables();
  list();
  plots();
}

// ---- marks: outlined for a moment, crossed when evicted, an arrow from a block to its copy, a dot if of the chosen request
function mark(now) {
  const context = $("blocks").getContext("2d"), small = cell < 4, ink = dark.matches ? WHITE : BLACK;
  for (const [marks, time] of [[flash, FLASH], [crosses, CROSS]])
    for (const [block, since] of marks) {
      if (now - since > time || block > drawn) marks.delete(block);
      else if (small) fill(block, ink);
    }
  if (small) for (const block of ofChosen) if (block <= drawn) fill(block, ink);
  arrows = arrows.filter((arrow) => now - arrow.since <= ARROW && Math.max(arrow.from, arrow.to) <= drawn);
  context.putImageData(image, 0, 0);
  context.strokeStyle = dark.matches ? "#ffffff" : "#000000";
  if (!small) {
    for (const block of flash.keys()) outline(context, block, 1);
    for (const block of crosses.keys()) cross(context, block);
    for (const block of ofChosen) dot(context, block);
  }
  context.strokeStyle = dark.matches ? "#ffffff" : "#000000";
  for (const arrow of arrows) point(context, arrow);
  if (focus) { context.strokeStyle = "#0072b2"; outline(context, Math.min(chosen, drawn), 3); }
  if (!again && (flash.size || crosses.size || arrows.length)) again = setTimeout(() => { again = null; draw(); }, 200);
}
function corner(block) {
  const at = block - 1;
  return [(at % columns) * cell, Math.floor(at / columns) * cell];
}
function outline(context, block, width) {
  const [x, y] = corner(block);
  context.lineWidth = width;
  context.strokeRect(x + 0.5, y + 0.5, cell - 1, cell - 1);
}
function cross(context, block) {
  const [x, y] = corner(block), inset = cell / 5;
  context.strokeStyle = inkOn(colourOf(block));
  context.lineWidth = cell > 10 ? 2 : 1;
  context.beginPath();
  for (const [from, to] of [[inset, cell - 1 - inset], [cell - 1 - inset, inset]]) {
    context.moveTo(x + from, y + inset);
    context.lineTo(x + to, y + cell - 1 - inset);
  }
  context.stroke();
}
function dot(context, block) {
  if (block > drawn) return;
  const [x, y] = corner(block);
  context.fillStyle = inkOn(colourOf(block));
  context.beginPath();
  context.arc(x + (cell - 1) / 2, y + (cell - 1) / 2, Math.max(1, cell / 6), 0, 7);
  context.fill();
}
function point(context, { from, to }) {
  const [x, y, u, v] = [...corner(from), ...corner(to)].map((at) => at + (cell - 1) / 2);
  const length = Math.hypot(u - x, v - y) || 1, head = Math.max(5, cell / 3);
  const [a, b] = [((u - x) / length) * head, ((v - y) / length) * head];
  // Bent, because a copy often lies in the same row as its source; in the first row downwards.
  const bend = Math.max(cell * 0.6, Math.min(length / 4, cell * 1.5)) * (Math.min(y, v) < cell ? 1 : -1);
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(x, y);
  context.quadraticCurveTo((x + u) / 2, (y + v) / 2 + bend, u, v);
  context.moveTo(u - a - b * 0.6, v - b - a * 0.6);
  context.lineTo(u, v);
  context.lineTo(u - a + b * 0.6, v - b + a * 0.6);
  context.stroke();
}

let legendOf = "";
function legend() {
  const byState = $("colour").value === "state";
  const entries = byState ? Object.entries(NAMES).map(([code, name]) => [+code ? STATES[code] : freeColour(), name])
    : tenants.slice(0, MOST_NAMED).map((name, i) => [TENANTS[i % TENANTS.length], name || "(no tenant)"]);
  if (!byState && tenants.length > MOST_NAMED) entries.push(["transparent", `and ${show(tenants.length - MOST_NAMED)} more`]);
  const text = JSON.stringify(entries);
  if (text === legendOf) return;
  legendOf = text;
  $("legend").replaceChildren(...entries.map(([colour, name]) => {
    const item = document.createElement("li"), swatch = document.createElement("i");
    swatch.style.background = colour;
    item.append(swatch, name);
    return item;
  }));
}

// ---- choosing a block
function blockAt(event) {
  const box = $("blocks").getBoundingClientRect(), scale = $("blocks").width / box.width;
  const x = Math.floor(((event.clientX - box.left) * scale) / cell), y = Math.floor(((event.clientY - box.top) * scale) / cell);
  const block = 1 + y * columns + x;
  return spec && x >= 0 && x < columns && block > 0 && block <= drawn ? block : null;
}
function tell(block) {
  $("at").textContent = block === null ? "" : `Block ${show(block)}: ${nameOf(codes[block])}`
    + (tenants[owners[block]] ? `, ${tenants[owners[block]]}` : "") + ".";
  $("blocks").title = $("at").textContent;
}
$("colour").onchange = () => draw();
$("blocks").onmousemove = (event) => tell(blockAt(event));
$("blocks").onmouseleave = () => tell(null);
$("blocks").onclick = (event) => {
  const block = blockAt(event);
  if (block !== null) { chosen = block; describe("blocks", block); draw(); }
};
$("blocks").onfocus = () => { focus = true; draw(); };
$("blocks").onblur = () => { focus = false; draw(); };
$("blocks").onkeydown = (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  if (by && spec) {
    chosen = Math.min(drawn, Math.max(1, chosen + by));
    tell(chosen);
    draw();
    event.preventDefault();
  }
  if (event.key === "Enter") describe("blocks", chosen);
};
dark.addEventListener("change", () => { if (spec) { layOut(); draw(); } });
// A scroll bar, or the phone's address bar, may also fire it; the same width needs nothing new.
addEventListener("resize", () => { if (spec && $("blocks").clientWidth !== laidOut) { layOut(); draw(); } });
