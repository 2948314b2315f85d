"use strict";
// The details of a chosen block or request, which are asked for, and the list of what has just happened.
const MOST_CELLS = 256, MOST_HAPPENED = 60, EVERY = 1000;
let picked = null, later = null; // picked: {kind, id, at, due}; of a request also {computedBy, ended}

function element(name, ...content) {
  const made = document.createElement(name);
  made.append(...content);
  return made;
}
function link(text, act) {
  const button = element("button", text);
  button.className = "link";
  button.onclick = act;
  return button;
}
function requestLink(id) { return link(id, () => describe("requests", id)); }

// What somebody has clicked.
function describe(kind, id) {
  picked = { kind, id, at: 0, due: true };
  return refresh();
}
// Ask again, at most once a second, while the chosen one changes. Of a request that has ended, its blocks are asked for.
async function refresh() {
  const now = performance.now(), mine = picked;
  if (!mine || !mine.due) return;
  if (mine.at && now - mine.at < EVERY) {
    later ??= setTimeout(() => { later = null; refresh(); }, EVERY - (now - mine.at));
    return;
  }
  mine.at = now;
  mine.due = false;
  const { ended } = mine, path = ended ? `blocks?ids=${[...ofChosen]}` : `${mine.kind}/${encodeURIComponent(mine.id)}`;
  const answer = await fetch("live/" + path, { headers: headers() }).catch(() => null);
  if (!answer) {
    mine.due = true; // the connection is lost, as follow() says; asked again after the next event
    return;
  }
  const found = await answer.json();
  if (picked !== mine || mine.ended !== ended) return; // another was clicked meanwhile, or a later answer came before
  if (answer.ok) (ended ? strike : mine.kind === "blocks" ? showBlock : showRequest)(found);
  else if (answer.status === 404 && mine.kind === "requests") end(mine);
  else if (!ended) put(found.error.message);
}
function end(mine) {
  mine.ended = true;
  if (!mine.computedBy) put(`Request ${mine.id}`, element("p", "It has ended."));
  else $("details").querySelector("p").textContent = "It has ended.";
  if (!ofChosen.size) return;
  Object.assign(mine, { due: true, at: 0 });
  refresh();
}
// The blocks of a request that has ended stay in view as long as they hold its tokens. Whether they do is asked again
// when blocks were evicted or freed.
function watchBlocks(evicted) {
  if (!picked || !picked.ended || !ofChosen.size) return;
  if (evicted || [...ofChosen].some((block) => !codes[block])) picked.due = true;
}
function strike(found) {
  $("details").querySelector("p").textContent = "It has ended. What has become of its blocks (struck out: they hold other tokens):";
  for (const [block, id] of found.computed_by) if (id !== (picked.computedBy.get(block) || picked.id)) lose(block);
  draw();
}
function lose(block) {
  ofChosen.delete(block);
  for (const button of $("details").querySelectorAll(`[data-block="${block}"]`)) button.classList.add("lost");
}
// Give a node these children. Those that are there already stay: a button keeps the focus, and a press that has begun
// before becomes a click.
function update(node, children) {
  children.forEach((child, at) => {
    const old = node.childNodes[at], made = typeof child === "string" ? document.createTextNode(child) : child;
    const isWhole = made.nodeName === "#text" || made.nodeName === "BUTTON";
    if (!old) node.append(made);
    else if (old.nodeName !== made.nodeName || old.className !== made.className) old.replaceWith(made);
    else if (!isWhole) update(old, [...made.childNodes]);
    else if (old.textContent !== made.textContent || old.title !== made.title) old.replaceWith(made);
  });
  while (node.childNodes.length > children.length) node.lastChild.remove();
}
function put(title, ...content) {
  const details = $("details"), hadFocus = details.contains(document.activeElement);
  update(details, [element("h2", title), ...content]);
  if (hadFocus && !details.contains(document.activeElement)) {
    // What was pressed is not there any more; Tab goes on from the new title.
    details.firstChild.tabIndex = -1;
    details.firstChild.focus();
  }
  ofChosen = new Set([...$("details").querySelectorAll(".table button")].map((button) => +button.dataset.block));
  colourTables();
  draw();
}

function showBlock(found) {
  const holders = found.holders.map((h) => element("p", "held by ", requestLink(h.id), h.tenant ? ` of ${h.tenant}` : "",
    `, for tokens ${show(h.index * spec.block_size)} to ${show((h.index + 1) * spec.block_size - 1)} of sequence ${h.seq_id}`));
  const cached = found.published ? `In the prefix cache, for prompts that begin with the same tokens; computed by ${found.computed_by}.`
    : found.state === "free" ? "It holds nothing." : "Not in the prefix cache: not full yet, or not to be shared.";
  put(`Block ${found.block}: ${found.state}, ${found.references} reference${found.references === 1 ? "" : "s"}`,
    element("p", cached), ...holders, ...(found.text === undefined ? [] : [element("p", "Tokens: " + JSON.stringify(found.text))]));
}

function showRequest(found) {
  // Of the blocks that others computed, by whom.
  picked.computedBy = new Map(Object.entries(found.reused).flatMap(([id, blocks]) => blocks.map((block) => [block, id])));
  let left = MOST_CELLS;
  const parts = [];
  for (const one of found.sequences) {
    const about = [`sequence ${one.seq_id}`, one.tables.length ? `${show(one.computed)} of ${show(one.tokens)} tokens` : "holds no blocks"];
    const { mode, tokens, evicted_tokens: evicted, evicted_mass: mass } = found.budget || {};
    const [verb, rest] = mode === "sparse_read" ? ["reads", "skipped"] : ["keeps", "let go"];
    const beyond = mode === "bounded" ? evicted : one.computed - tokens;
    const price = mass ? `, with ${(100 * mass).toFixed(1)} % of the attention's mass` : "";
    if (beyond > 0) about.push(`${verb} ${show(tokens)} (${mode}), ${show(beyond)} ${rest}${price}`);
    if (one.preemptions) about.push(`preempted ${one.preemptions} ×`);
    for (const table of one.tables.length ? one.tables : [[]]) {
      const cells = table.slice(0, Math.max(0, left)).map(tableCell);
      left -= cells.length;
      const row = element("div", element("span", about.join(", ")), ...cells,
        ...(cells.length < table.length ? [`and ${show(table.length - cells.length)} more`] : []));
      row.className = "table";
      parts.push(row);
    }
  }
  const several = found.sequences.length > 1 ? "block tables" : "block table";
  put(`Request ${found.id}`, element("p", `${show(found.prompt)} prompt tokens; ${several}, in the order of the tokens:`), ...parts);
}
function tableCell(block, index) {
  if (!block) return "–"; // before a sliding window
  const button = element("button", String(block));
  button.dataset.block = block;
  button.title = `tokens ${show(index * spec.block_size)} to ${show((index + 1) * spec.block_size - 1)}: block ${block}`;
  button.onclick = () => { chosen = block; describe("blocks", block); };
  return button;
}
// The cells of a block table have the colours of the blocks, as they change.
function colourTables() {
  for (const button of $("details").querySelectorAll(".table button")) {
    const block = +button.dataset.block, colour = block < codes.length ? colourOf(block) : "";
    if (button.dataset.colour === colour) continue;
    button.dataset.colour = button.style.background = colour;
    button.style.color = inkOn(colour);
  }
}

// ---- what has just happened: one line per kind and second
const happened = [];
const few = (items, count) => items.slice(0, 8).join(", ") + (count > Math.min(8, items.length) ? ", …" : "");
const SENTENCES = {
  hit: (count, [one]) => count > 1 ? [`prefix hits: ${show(count)} requests share cached blocks`]
    : ["prefix hit: ", requestLink(one.id), ` takes ${show(one.cache.cached_tokens)} of ${show(one.prompt)} prompt tokens from the cache`],
  copied: (count, copies) => [`copy-on-write: ${few(copies.map(([, from, to]) => `block ${from} → ${to}`), count)} for `, requestLink(copies[0][0])],
  evicted: (count, blocks) => [`evicted: ${show(count)} cached block${count === 1 ? "" : "s"} taken for other tokens: ${few(blocks, count)}`],
  preempted: (count, [one]) => count > 1 ? [`preempted: ${show(count)} requests gave their blocks back`]
    : ["preempted: ", requestLink(one.id), " gave its blocks back" + (one.progress[0] === 2 ? "; swapped out to host memory" : "; its tokens will be computed again")],
  resumed: (count, [one]) => count > 1 ? [`resumed: ${show(count)} preempted requests`] : ["resumed: ", requestLink(one.id)],
};
function happen(kind, items, count = items.length) {
  if (!count) return;
  const now = performance.now();
  let entry = happened.find((one) => one.kind === kind && now - one.at < 1000);
  if (entry) {
    entry.count += count;
    if (entry.items.length < 8) entry.items.push(...items.slice(0, 8));
  } else {
    const time = element("time", new Date().toLocaleTimeString("en", { hour12: false }));
    entry = { kind, at: now, count, items: items.slice(0, 8), line: element("li"), time };
    happened.unshift(entry);
    $("log").prepend(entry.line);
    while (happened.length > MOST_HAPPENED) happened.pop().line.remove();
  }
  update(entry.line, [entry.time, ...SENTENCES[kind](entry.count, entry.items)]);
}
