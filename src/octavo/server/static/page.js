"use strict";
// The live page. It keeps the last state of every block and request, takes in changes as they come, and draws at most
// once a frame. Text from the server is only ever set as text.
const MINUTES = 2, MOST_ROWS = 100;
let spec = null, codes = [], owners = [], tenants = [""], requests = new Map();
let counters = [], unlisted = 0, tiers = [], bounds = {}, history = [];

// No key has other characters, and fetch() throws if a header has: a key is often pasted with what cannot be seen.
const KEY = /^[!-~]+$/;
function key() {
  const kept = sessionStorage.getItem("octavo-admin-key") || "";
  return KEY.test(kept) ? kept : "";
}
function headers() { return key() ? { Authorization: "Bearer " + key() } : {}; }
function say(text, lost = false) {
  $("status").textContent = text;
  $("status").className = lost ? "lost" : "";
  document.body.classList.toggle("stale", lost);
}
function show(number, digits = 0) {
  return number === null || !isFinite(number) ? "–" : number.toLocaleString("en", { maximumFractionDigits: digits });
}

let following = null; // aborts what follows the server, of which there is only one
let displaced = false; // whether the server ended it for another page; two that open again by themselves would alternate
async function follow() {
  if (following) following.abort();
  const { signal } = (following = new AbortController());
  $("again").hidden = true;
  displaced = false;
  while (!signal.aborted) {
    let wait = 1000;
    try {
      const answer = await fetch("live/events", { headers: headers(), signal, cache: "no-store" });
      const refused = answer.status === 401;
      $("key-form").hidden = !refused;
      if (answer.ok) {
        say("live");
        await read(answer.body.getReader());
        if (displaced) {
          $("again").hidden = false;
          say("Another page was opened, and took the place of this one.", true);
          return;
        }
        say("the server closed the connection; trying again …", true);
      } else {
        const { message } = (await answer.json()).error;
        say(message + (refused ? "" : " Trying again …"), true);
        if (refused) return;
        wait = 5000;
      }
    } catch (error) {
      if (signal.aborted) return;
      say("no connection; trying again …", true);
    }
    await new Promise((done) => setTimeout(done, wait));
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
  if (news.displaced) {
    displaced = true;
    return;
  }
  if (news.model !== undefined) {
    $("model").textContent = news.model;
    bounds = { ttft: news.ttft_bounds, itl: news.itl_bounds };
    requests.clear();
    for (const marks of [flash, crosses]) marks.clear();
    arrows = [];
    history = [];
    if (picked) picked.due = true; // it may have ended while there was no connection
    return;
  }
  const now = performance.now();
  if (news.spec) { spec = news.spec; drawn = 0; $("block-size").textContent = spec.block_size; layOut(); }
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
    if (picked && picked.kind === "blocks" && picked.id === block) picked.due = true;
  }
  for (const block of news.evicted || []) crosses.set(block, now);
  watchBlocks(news.counters[4] !== counters[4]);
  for (const [, from, to] of news.copied || []) arrows.push({ from, to, since: now });
  arrows = arrows.filter((arrow) => now - arrow.since <= ARROW); // a hidden tab draws nothing
  const done = followRequests(news);
  if (history.length) {
    happen("evicted", news.evicted || [], news.counters[4] - counters[4]);
    happen("copied", news.copied || [], news.counters[6] - counters[6]);
    for (const [kind, ones] of Object.entries(done)) happen(kind, ones);
  }
  counters = news.counters;
  unlisted = news.unlisted || 0;
  tiers = news.tiers;
  history.push({ at: news.at, totals: news.totals, ttft: news.ttft, itl: news.itl, counters, used: share(codes) });
  while (history.length > 2 && news.at - history[0].at > 60 * MINUTES) history.shift();
  $("saved").textContent = saved(news.totals);
  draw();
  refresh();
}
// What the cache did since the server started, in a sentence.
function saved([, , asked, hits]) {
  if (!asked) return "No prompt has been looked up in the cache yet.";
  return `${show((100 * hits) / asked)} % of prompt tokens came from the cache: ${show(hits)} of ${show(asked)} were not computed.`;
}

// Take in what requests have done; return those that began with cached tokens, were preempted or resumed.
function followRequests(news) {
  const done = { hit: [], preempted: [], resumed: [] };
  const began = (one) => { if (one.cache && one.cache.cached_tokens) done.hit.push(one); };
  for (const one of news.added || []) {
    requests.set(one.id, one);
    if (one.progress[0] === RUNNING && !one.progress[3]) began(one);
  }
  for (const [id, state, computed, output, preempted, cache] of news.updated || []) {
    const one = requests.get(id);
    if (!one) continue;
    const [stateBefore, , , preemptedBefore] = one.progress;
    one.progress = [state, computed, output, preempted];
    if (cache !== undefined) one.cache = cache;
    if (preempted > preemptedBefore) done.preempted.push(one);
    else if (state === RUNNING && stateBefore !== RUNNING) preempted ? done.resumed.push(one) : began(one);
    if (picked && picked.id === id) picked.due = true;
  }
  for (const id of news.removed || []) {
    requests.delete(id);
    if (picked && picked.id === id) Object.assign(picked, { due: true, at: 0 }); // at once: others take its blocks
  }
  return done;
}

// The share of the blocks, without the null block, that requests hold.
function share(codes) {
  let held = 0;
  for (let block = 1; block < codes.length; block++) if (codes[block] >= 3) held++;
  return held / Math.max(1, codes.length - 1);
}

// ---- requests
const WAITING = 0, RUNNING = 1, STATES_OF_REQUESTS = ["waiting", "running", "swapped out"];
// Why no more came from the cache, in a few words and in more.
const REASONS = {
  cold: () => ["cold: new tokens", "as far as is remembered, nobody has computed these tokens before"],
  diverged: (cache) => [`diverged at token ${show(cache.diverged_at)}`, `as ${cache.diverged_from} until there, which goes on differently`],
  evicted: (cache) => [`evicted ${cache.evicted_seconds_ago === null ? "long" : show(cache.evicted_seconds_ago) + " s"} before`, "these tokens were cached, and their blocks taken for others"],
  salt: () => ["another tenant's", "they are cached for another tenant, or with another salt"],
  too_short: () => ["too short", "the prompt fills no block before its last token"],
  bypassed: () => ["not looked up", "prefix caching is off, or the request needs every token's logits"],
};
function reason({ cache }) {
  if (!cache) return ["", ""];
  if (!cache.reason) return ["all there is", "every full block before the last token came from the cache"];
  return REASONS[cache.reason] ? REASONS[cache.reason](cache) : [cache.reason, ""];
}
const rows = new Map();
function list() {
  $("queue").textContent = `${show(counters[0])} running, ${show(counters[1])} waiting, ${show(counters[2])} of them swapped out`
    + (counters[7] ? `; ${show(counters[8])} of ${show(counters[7])} drafted tokens accepted, ${counters[9]} s saved` : "");
  // Who runs comes first; within these, who came first.
  const all = [...requests.values()], runs = (one) => one.progress[0] === RUNNING;
  const shown = [...all.filter(runs), ...all.filter((one) => !runs(one))].slice(0, MOST_ROWS), body = $("requests");
  const ids = new Set(shown.map((one) => one.id));
  for (const [id, row] of rows) if (!ids.has(id)) { row.remove(); rows.delete(id); }
  const focused = document.activeElement;
  shown.forEach((one, at) => {
    const row = rows.get(one.id) || newRow(one);
    if (body.children[at] !== row) body.insertBefore(row, body.children[at] || null);
    fillRow(row, one);
  });
  if (body.contains(focused)) focused.focus({ preventScroll: true }); // a row that is moved loses it
  if (shown.some((one) => one.tenant)) body.parentNode.className = "";
  const left = requests.size - shown.length + unlisted;
  $("others").textContent = left ? `and ${show(left)} more` : shown.length ? "" : "No request runs or waits.";
}
function newRow(one) {
  const row = document.createElement("tr");
  for (let i = 0; i < 8; i++) row.insertCell();
  row.cells[0].append(requestLink(one.id));
  row.onclick = (event) => { if (!event.target.closest("button")) describe("requests", one.id); };
  row.cells[0].title = one.id;
  row.cells[1].textContent = row.cells[1].title = one.tenant;
  row.cells[6].append(document.createElement("meter"), " ", document.createElement("span"));
  rows.set(one.id, row);
  return row;
}
function fillRow(row, one) {
  const [state, computed, output, preempted] = one.progress, [why, more] = reason(one);
  const texts = [null, null, STATES_OF_REQUESTS[state] + (preempted ? `, preempted ${preempted} ×` : ""), show(one.prompt),
    show(one.cache ? one.cache.cached_tokens : null), show(computed), null, why];
  texts.forEach((text, i) => { if (text !== null && row.cells[i].textContent !== text) row.cells[i].textContent = text; });
  row.cells[7].title = more;
  const [meter, , text] = row.cells[6].childNodes;
  meter.max = one.max;
  meter.value = output;
  text.textContent = `${show(output)} of ${show(one.max)}`;
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
let plotted = -Infinity;
function plots() {
  const now = performance.now();
  if (now - plotted < 500 || !history.length) return;
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
    figure.children[1].textContent = show(current, current >= 100 ? 0 : digits);
    canvas.width = 150;
    canvas.height = 36;
    const values = points.map(([a, b]) => [a.at, value(a, b)]).filter(([, v]) => v !== null && isFinite(v));
    // Not every look is a point, so the last value counts by itself.
    const top = Math.max(1e-9, isFinite(current) ? current : 0, ...values.map(([, v]) => v));
    figure.children[2].textContent = values.length ? `highest ${show(top < 1e-6 ? 0 : top, top >= 100 ? 0 : digits)}` : "";
    context.strokeStyle = dark.matches ? "#56b4e9" : "#0072b2";
    context.lineWidth = 1.5;
    context.beginPath();
    for (const [at, v] of values) context.lineTo(150 * (1 - (last.at - at) / (60 * MINUTES)), 34 - (32 * v) / top);
    context.stroke();
  });
}

$("key-form").onsubmit = (event) => {
  event.preventDefault();
  const typed = $("key").value.trim();
  if (typed && !KEY.test(typed)) {
    following.abort();
    say("Incorrect API key: it has a character that no key has, perhaps one that cannot be seen.", true);
    return;
  }
  sessionStorage.setItem("octavo-admin-key", typed);
  follow();
};
$("again").onclick = follow;
follow();
