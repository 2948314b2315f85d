"use strict";
// The live page. It keeps the last state of every block and request, takes in changes as they come, and draws at most
// once a frame. Text from the server is only ever set as text.
const $ = (id) => document.getElementById(id);
// Okabe and Ito: told apart by the colour-blind. Held by one: orange; by two … eight and more: vermilion, ever darker.
const STATES = ["#ffffff", "#56b4e9", "#f0e442", "#e69f00", "#d55e00", "#c45300", "#b24900", "#9f4000", "#8b3700", "#762d00", "#602200"];
// In the dark, free cells are nearly black, and what lies between cells is darker than they are in the light.
const DARK_FREE = "#101010", GAPS = ["#bbbbbb", "#444444"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const NAMES = { 0: "free", 1: "cached", 2: "pinned", 3: "active", 4: "shared by 2 to 7", 10: "shared by 8 or more" };
const TENANTS = ["#4d4d4d", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"];
const MINUTES = 2;
let spec = null, codes = [], owners = [], flash = new Map(), tenants = [""], requests = new Map();
let counters = [], tiers = [], bounds = {}, history = [], chosen = 1, wanted = false, focus = false;

function key() { return sessionStorage.getItem("octavo-admin-key") || ""; }
function headers() { return key() ? { Authorization: "Bearer " + key() } : {}; }
function say(text, lost = false) { $("status").textContent = text; $("status").className = lost ? "lost" : ""; }
function show(number, digits = 0) {
  return number === null || !isFinite(number) ? "–" : number.toLocaleString("en", { maximumFractionDigits: digits });
}

async function follow() {
  for (;;) {
    try {
      const answer = await fetch("live/events", { headers: headers() });
      if (answer.status === 401 || answer.status === 403) {
        say((await answer.json()).error.message, true);
        $("key-form").hidden = false;
        return;
      }
      if (!answer.ok) throw new Error("status " + answer.status);
      $("key-form").hidden = true;
      say("live");
      await read(answer.body.getReader());
      say("the server closed the connection; trying again …", true);
    } catch (error) {
      say("no connection; trying again …", true);
    }
    await new Promise((done) => setTimeout(done, 1000));
  }
}

async function read(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) take(JSON.parse(event.slice(6)));
  }
}

function take(news) {
  if (news.model !== undefined) {
    $("model").textContent = news.model;
    bounds = { ttft: news.ttft_bounds, itl: news.itl_bounds };
    requests.clear();
    flash.clear();
    history = [];
    return;
  }
  const now = performance.now();
  if (news.spec) { spec = news.spec; $("block-size").textContent = spec.block_size; layOut(); }
  if (news.tenants) tenants = news.tenants;
  if (news.all) {
    const [code, owner] = news.all;
    codes = new Uint8Array(code.length);
    owners = new Uint16Array(code.length);
    for (let i = 0; i < code.length; i++) { codes[i] = code.charCodeAt(i) - 48; owners[i] = owner.charCodeAt(i) - 48; }
  }
  const changes = news.blocks || [];
  for (let i = 0; i < changes.length; i += 3) {
    const block = changes[i];
    // Taken or given up, shared or evicted, not merely another tenant's colour.
    if (codes[block] !== changes[i + 1]) flash.set(block, now);
    codes[block] = changes[i + 1];
    owners[block] = changes[i + 2];
  }
  for (const one of news.came || []) requests.set(one.id, one);
  for (const [id, running, computed, output, preempted, cache] of news.moved || []) {
    const one = requests.get(id);
    if (!one) continue;
    one.progress = [running, computed, output, preempted];
    if (cache !== undefined) one.cache = cache;
  }
  for (const id of news.gone || []) requests.delete(id);
  counters = news.counters;
  tiers = news.tiers;
  history.push({ at: news.at, totals: news.totals, ttft: news.ttft, itl: news.itl, counters, used: share(codes) });
  while (history.length > 2 && news.at - history[0].at > 60 * MINUTES) history.shift();
  draw();
}

// The share of the blocks, without the null block, that requests hold.
function share(codes) {
  let held = 0;
  for (let block = 1; block < codes.length; block++) if (codes[block] >= 3) held++;
  return held / Math.max(1, codes.length - 1);
}

// ---- the canvas of blocks
// Cells are written as pixels, and only those whose colour has changed: 100,000 of them take a millisecond or two.
let columns = 1, cell = 8, image = null, pixels = null, painted = null;
function layOut() {
  const canvas = $("blocks"), width = canvas.clientWidth || 1000, count = spec.num_blocks - 1;
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
function freeColour() { return dark.matches ? DARK_FREE : STATES[0]; }
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
  const context = $("blocks").getContext("2d"), now = performance.now(), byState = $("colour").value === "state";
  const free = pixelOf(freeColour());
  const tally = [0, 0, 0, 0];
  for (let block = 1; block < codes.length; block++) {
    const code = codes[block];
    tally[code < 3 ? code : 3]++;
    const pixel = code === 0 ? free : byState ? STATE_PIXELS[code] : TENANT_PIXELS[owners[block] % TENANTS.length];
    if (painted[block] !== pixel) fill(block, pixel);
  }
  for (const [block, since] of flash) {
    if (now - since > 400) flash.delete(block);
    else if (cell < 4) fill(block, dark.matches ? WHITE : BLACK); // too small for an outline
  }
  context.putImageData(image, 0, 0);
  context.strokeStyle = dark.matches ? "#ffffff" : "#000000";
  if (cell >= 4) for (const block of flash.keys()) outline(context, block, 1);
  if (focus) { context.strokeStyle = "#0072b2"; outline(context, chosen, 3); }
  if (flash.size) setTimeout(draw, 420);
  const bytes = (count) => show((count * spec.block_bytes) / 2 ** 20, 1) + " MiB";
  $("usage").textContent = `${show(tally[3])} active (${bytes(tally[3])}), ${show(tally[1])} cached, ${show(tally[2])} pinned, `
    + `${show(tally[0])} free` + (spec.host_blocks ? `; host: ${show(counters[3])} of ${show(spec.host_blocks)} blocks` : "")
    + tiers.map(([name, open, stored, loaded]) => `; ${name}: ${show(stored)} blocks written, ${show(loaded)} read`
      + (open ? "" : " (closed after errors)")).join("");
  legend();
  list();
  plots();
}
function outline(context, block, width) {
  const at = block - 1;
  context.lineWidth = width;
  context.strokeRect((at % columns) * cell + 0.5, Math.floor(at / columns) * cell + 0.5, cell - 1, cell - 1);
}
let legendOf = "";
function legend() {
  const byState = $("colour").value === "state";
  const entries = byState ? Object.entries(NAMES).map(([code, name]) => [+code ? STATES[code] : freeColour(), name])
    : tenants.map((name, i) => [TENANTS[i % TENANTS.length], name || "(no tenant)"]);
  const text = JSON.stringify(entries);
  if (text === legendOf) return;
  legendOf = text;
  $("legend").replaceChildren(...entries.map(([colour, name]) => {
    const item = document.createElement("li"), mark = document.createElement("i");
    mark.style.background = colour;
    item.append(mark, name);
    return item;
  }));
}

// ---- requests
const rows = new Map();
function list() {
  $("queue").textContent = `${show(counters[0])} running, ${show(counters[1])} waiting, ${show(counters[2])} of them swapped out`;
  for (const [id, row] of rows) if (!requests.has(id)) { row.remove(); rows.delete(id); }
  const room = 100;
  for (const [id, one] of requests) {
    let row = rows.get(id);
    if (!row) {
      if (rows.size >= room) continue;
      row = document.createElement("tr");
      for (let i = 0; i < 8; i++) row.insertCell();
      const button = document.createElement("button");
      button.textContent = button.title = id;
      button.onclick = () => describe("requests/" + encodeURIComponent(id));
      row.cells[0].append(button);
      row.cells[1].textContent = one.tenant;
      const meter = document.createElement("meter");
      row.cells[6].append(meter, " ", document.createElement("span"));
      $("requests").append(row);
      rows.set(id, row);
    }
    const [running, computed, output, preempted] = one.progress;
    const cached = one.cache ? one.cache.cached_tokens : null;
    const texts = [null, null, (running ? "running" : "waiting") + (preempted ? `, preempted ${preempted} ×` : ""),
      show(one.prompt), show(cached), show(computed), null, (one.cache && one.cache.reason) || (one.cache ? "everything cached" : "")];
    texts.forEach((text, i) => { if (text !== null && row.cells[i].textContent !== text) row.cells[i].textContent = text; });
    const meter = row.cells[6].firstChild;
    meter.max = one.max;
    meter.value = output;
    row.cells[6].lastChild.textContent = `${show(output)} of ${show(one.max)}`;
  }
  const left = requests.size - rows.size;
  $("others").textContent = left ? `and ${show(left)} more` : rows.size ? "" : "No request runs or waits.";
}

// ---- details
async function describe(path) {
  const answer = await fetch("live/" + path, { headers: headers() });
  const found = await answer.json(), box = $("details");
  const title = document.createElement("h2"), text = document.createElement("pre");
  if (!answer.ok) {
    title.textContent = found.error.message;
  } else if (found.block) {
    title.textContent = `Block ${found.block}: ${found.state}, ${found.references} reference${found.references === 1 ? "" : "s"}`;
    text.textContent = [
      found.published ? `in the prefix cache, for prompts that begin with the same tokens; computed by ${found.computed_by}` : "not in the prefix cache: not full yet, or not to be shared",
      ...found.holders.map((h) => `held by ${h.id}${h.tenant ? " of " + h.tenant : ""}, at position ${h.index} of its block table`),
      ...(found.text === undefined ? [] : ["tokens: " + JSON.stringify(found.text)]),
    ].join("\n");
  } else {
    title.textContent = `Request ${found.id}: ${found.prompt} prompt tokens`;
    text.textContent = found.sequences.map((s) =>
      `sequence ${s.seq_id}, ${s.status}: ${s.computed} of ${s.tokens} tokens computed, preempted ${s.preemptions} ×\n`
      + s.tables.map((table, i) => `  table ${i}: ${table.join(" ")}`).join("\n")).join("\n");
  }
  box.replaceChildren(title, text);
  box.hidden = false;
}

// ---- small plots over the last minutes
function percentile(name, now, before, q) {
  const counts = now[name].map((count, i) => count - before[name][i]);
  let left = counts.reduce((a, b) => a + b, 0) * q;
  if (!left) return null;
  for (let i = 0; i < counts.length; i++) {
    if (left <= counts[i]) {
      const low = i ? bounds[name][i - 1] : 0, high = i < bounds[name].length ? bounds[name][i] : low;
      return 1000 * (low + (high - low) * (left / counts[i]));
    }
    left -= counts[i];
  }
  return null;
}
const rate = (i) => (now, before) => (now.totals[i] - before.totals[i]) / (now.at - before.at);
const event = (i) => (now, before) => (now.counters[i] - before.counters[i]) / (now.at - before.at);
// In the order of an operator's questions: how much is there to do, is there room, do clients wait, how much gets done.
const PLOTS = [
  ["running", (now) => now.counters[0], 0],
  ["waiting", (now) => now.counters[1], 0],
  ["KV cache in use, %", (now) => 100 * now.used, 1],
  ["evictions / s", event(4), 1],
  ["preemptions / s", event(5), 1],
  ["prefix cache hits, %", (now, before) => {
    const asked = now.totals[2] - before.totals[2];
    return asked ? (100 * (now.totals[3] - before.totals[3])) / asked : null;
  }, 1],
  ["TTFT p50, ms", (now, before) => percentile("ttft", now, before, 0.5), 0],
  ["TTFT p99, ms", (now, before) => percentile("ttft", now, before, 0.99), 0],
  ["inter-token p50, ms", (now, before) => percentile("itl", now, before, 0.5), 1],
  ["inter-token p99, ms", (now, before) => percentile("itl", now, before, 0.99), 1],
  ["output tokens / s", rate(1), 0],
  ["prompt tokens / s", rate(0), 0],
];
for (const [title] of PLOTS) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  caption.textContent = title;
  figure.append(caption, document.createElement("strong"), document.createElement("small"),
    document.createElement("canvas"));
  $("plots").append(figure);
}
let plotted = 0;
function plots() {
  const now = performance.now();
  if (now - plotted < 500 || history.length < 2) return;
  plotted = now;
  const last = history[history.length - 1];
  // Each value is over the five seconds before it.
  const points = [];
  for (let i = 1, j = 0, step = Math.max(1, Math.floor(history.length / 150)); i < history.length; i += step) {
    while (j < i - 1 && history[i].at - history[j].at > 5) j++;
    points.push([history[i], history[j]]);
  }
  let before = history[0];
  for (const one of history) { if (last.at - one.at <= 5) break; before = one; }
  PLOTS.forEach(([, value, digits], index) => {
    const figure = $("plots").children[index], canvas = figure.lastChild, context = canvas.getContext("2d");
    const current = value(last, before);
    figure.children[1].textContent = show(current, digits);
    canvas.width = 150;
    canvas.height = 36;
    const values = points.map(([a, b]) => [a.at, value(a, b)]).filter(([, v]) => v !== null && isFinite(v));
    // Not every look is a point, so the last value counts by itself.
    const top = Math.max(1e-9, isFinite(current) ? current : 0, ...values.map(([, v]) => v));
    figure.children[2].textContent = values.length ? `highest ${show(top < 1e-6 ? 0 : top, digits)}` : "";
    context.strokeStyle = dark.matches ? "#56b4e9" : "#0072b2";
    context.lineWidth = 1.5;
    context.beginPath();
    for (const [at, v] of values) context.lineTo(150 * (1 - (last.at - at) / (60 * MINUTES)), 34 - (32 * v) / top);
    context.stroke();
  });
}

$("colour").onchange = draw;
$("blocks").onclick = (event) => {
  const box = $("blocks").getBoundingClientRect(), scale = $("blocks").width / box.width;
  const x = Math.floor(((event.clientX - box.left) * scale) / cell), y = Math.floor(((event.clientY - box.top) * scale) / cell);
  const block = 1 + y * columns + x;
  if (spec && x < columns && block < spec.num_blocks) { chosen = block; describe("blocks/" + block); draw(); }
};
$("blocks").onfocus = () => { focus = true; draw(); };
$("blocks").onblur = () => { focus = false; draw(); };
$("blocks").onkeydown = (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  if (by && spec) { chosen = Math.min(spec.num_blocks - 1, Math.max(1, chosen + by)); draw(); event.preventDefault(); }
  if (event.key === "Enter") describe("blocks/" + chosen);
};
$("key-form").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem("octavo-admin-key", $("key").value);
  follow();
};
for (const [target, event] of [[window, "resize"], [dark, "change"]])
  target.addEventListener(event, () => { if (spec) { layOut(); draw(); } });
follow();
