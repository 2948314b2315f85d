"use strict";
// The chat page. Text from the model or the server is only ever set as text. Chats are kept in the browser's storage.
const MOST_CHATS = 50, NUMBERS = ["temperature", "top_p", "repetition_penalty", "max_tokens", "seed"];
const $ = (id) => document.getElementById(id);
const read = (name, otherwise) => { try { return JSON.parse(localStorage.getItem(name)) ?? otherwise; } catch { return otherwise; } };
// A chat: {id, messages}; a message: {role, content}, of an answer also {thoughts, about, failed}.
let chats = read("octavo-chats", []), chat = chats[0] || null, running = null;

// No key has other characters, and fetch() throws if a header has: a key is often pasted with what cannot be seen.
const KEY = /^[!-~]+$/;
function headers() {
  const key = sessionStorage.getItem("octavo-key") || "";
  return { "Content-Type": "application/json", ...(KEY.test(key) ? { Authorization: "Bearer " + key } : {}) };
}
function element(name, className, ...content) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...content);
  return made;
}
const show = (number) => number.toLocaleString("en", { maximumFractionDigits: 1 });
function save() {
  chats = chats.slice(0, MOST_CHATS);
  // Where the storage is full, the oldest chats go.
  for (;;)
    try { return localStorage.setItem("octavo-chats", JSON.stringify(chats)); } catch {
      if (chats.length < 2) return;
      chats.pop();
    }
}

// ---- what is drawn
function drawChats() {
  $("chats").replaceChildren(...chats.map((one) => {
    const open = element("button", "", one.messages[0].content.slice(0, 60)), drop = element("button", "", "✕");
    drop.title = "Delete this chat";
    open.onclick = () => { stop(); chat = one; drawAll(); showSide(false); };
    drop.onclick = () => {
      if (chat === one) { stop(); chat = null; }
      chats = chats.filter((other) => other !== one);
      save();
      drawAll();
    };
    return element("li", one === chat ? "open" : "", open, drop);
  }));
}
function drawAll() {
  drawChats();
  $("messages").replaceChildren(...(chat ? chat.messages : []).map(newMessage));
  $("status").textContent = "";
  scroll(true);
}
function newMessage(message) {
  const item = element("li", message.role);
  fill(item, message);
  return item;
}
function fill(item, message) {
  const parts = [];
  if (message.thoughts) parts.push(element("details", "thoughts", element("summary", "", "Thoughts"), element("div", "text", message.thoughts)));
  parts.push(formatted(message.content));
  if (message.about || message.failed) parts.push(aboutLine(message));
  const open = item.querySelector("details")?.open;
  item.replaceChildren(...parts);
  if (open) item.querySelector("details").open = true;
}
// Fenced code, `code` and **bold** become elements that hold text; all else is shown as it came.
function formatted(text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  return element("div", "text", ...parts.flatMap((part, i) => (i % 2 ? [element("pre", "", part)] : withMarks(part))));
}
function withMarks(text) {
  const parts = text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/);
  const marked = (part) => (part[0] === "`" ? element("code", "", part.slice(1, -1)) : element("b", "", part.slice(2, -2)));
  return parts.map((part, i) => (i % 2 ? marked(part) : part));
}
function aboutLine(message) {
  const line = element("p", message.failed ? "about failed" : "about", message.failed || message.about);
  const copy = element("button", "", "Copy"), retry = element("button", "", "Again");
  copy.onclick = () => navigator.clipboard?.writeText(message.content);
  retry.onclick = () => {
    if (running) return;
    chat.messages.length = chat.messages.indexOf(message);
    drawAll();
    answer();
  };
  line.append(copy, retry);
  return line;
}
function scroll(always = false) {
  const view = document.querySelector("main");
  if (always || view.scrollHeight - view.scrollTop - view.clientHeight < 120) view.scrollTop = view.scrollHeight;
}
function showSide(shown) {
  document.body.classList.toggle("side", shown);
  $("menu").setAttribute("aria-expanded", shown);
}
function setRunning(controller) {
  running = controller;
  $("send").hidden = !!controller;
  $("stop").hidden = !controller;
}

// ---- asking
function body() {
  const settings = read("octavo-settings", {}), fields = {};
  for (const name of NUMBERS) if (settings[name]) fields[name] = Number(settings[name]);
  const history = chat.messages.filter((one) => one.content).map(({ role, content }) => ({ role, content }));
  const system = (settings.system || "").trim();
  return JSON.stringify({ model: $("model").value, messages: system ? [{ role: "system", content: system }, ...history] : history,
    stream: true, stream_options: { include_usage: true }, ...fields });
}
async function answer() {
  const mine = chat, message = { role: "assistant", content: "" }, sent = body(), item = newMessage(message);
  const controller = new AbortController(), began = performance.now(), seen = { first: 0, usage: null, reason: null };
  $("status").textContent = "";
  item.classList.add("busy");
  $("messages").append(item);
  setRunning(controller);
  let drawing = false;
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: sent, signal: controller.signal });
    if (!response.ok) throw await refusal(response);
    for await (const event of events(response.body.getReader())) {
      if (event.error) throw new Error(event.error.message);
      take(event, message, seen);
      if (drawing) continue;
      drawing = true;
      requestAnimationFrame(() => { drawing = false; if (running === controller) { fill(item, message); scroll(); } });
    }
  } catch (error) {
    if (!controller.signal.aborted) message.failed = error instanceof TypeError ? "The connection was lost." : error.message;
  }
  if (running === controller) setRunning(null);
  if (!message.failed) message.about = about(seen, began, controller.signal.aborted);
  mine.messages.push(message);
  save();
  item.classList.remove("busy");
  fill(item, message);
  scroll();
}
function take(event, message, seen) {
  const choice = event.choices?.[0], delta = choice?.delta || {};
  if (event.usage) seen.usage = event.usage;
  if (choice?.finish_reason) seen.reason = choice.finish_reason;
  const thoughts = delta.reasoning_content || delta.reasoning || "";
  if ((delta.content || thoughts) && !seen.first) seen.first = performance.now();
  if (thoughts) message.thoughts = (message.thoughts || "") + thoughts;
  message.content += delta.content || "";
}
// What stands below an answer.
function about({ first, usage, reason }, began, stopped) {
  const said = [];
  if (usage) {
    const seconds = (performance.now() - first) / 1000, cached = usage.prompt_tokens_details?.cached_tokens || 0;
    const rate = usage.completion_tokens > 1 && seconds > 0 ? `, ${show((usage.completion_tokens - 1) / seconds)} a second` : "";
    said.push(`${show(usage.completion_tokens)} tokens${rate}`, `first after ${show(Math.round(first ? first - began : 0))} ms`);
    said.push(`${show(cached)} of ${show(usage.prompt_tokens)} prompt tokens cached`);
  }
  if (stopped) said.push("stopped");
  else if (reason === "length") said.push("cut at the limit of tokens");
  return said.join(" · ") || "no answer";
}
async function refusal(response) {
  const found = await response.json().catch(() => null);
  if (response.status === 401) askForKey();
  return new Error(found?.error?.message || `The server answered ${response.status}.`);
}
async function* events(reader) {
  const decoder = new TextDecoder();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    rest += decoder.decode(value, { stream: !done });
    const whole = rest.split("\n\n");
    rest = whole.pop();
    for (const event of whole)
      if (event.startsWith("data: ") && event !== "data: [DONE]") yield JSON.parse(event.slice(6));
    if (done) return;
  }
}
function stop() {
  running?.abort();
  setRunning(null);
}
function send() {
  const text = $("text").value.trim();
  if (!text || running) return;
  if (!chat) chats.unshift((chat = { id: Date.now(), messages: [] }));
  const message = { role: "user", content: text };
  chat.messages.push(message);
  $("messages").append(newMessage(message));
  $("text").value = "";
  grow();
  scroll(true);
  save();
  drawChats();
  return answer();
}

// ---- the server's models, the key, and what the user does
function askForKey() {
  $("key-form").hidden = false;
  $("key").focus();
}
async function loadModels() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw await refusal(response);
    const names = (await response.json()).data.map((model) => model.id);
    $("model").replaceChildren(...names.map((name) => element("option", "", name)));
    $("key-form").hidden = true;
    $("status").textContent = "";
  } catch (error) {
    $("status").textContent = error instanceof TypeError ? "No connection to the server." : error.message;
  }
}
function grow() {
  $("text").style.height = "auto";
  $("text").style.height = $("text").scrollHeight + 2 + "px";
}
const settings = read("octavo-settings", {});
for (const name of ["system", ...NUMBERS]) {
  $(name).value = settings[name] ?? "";
  $(name).onchange = () => {
    settings[name] = $(name).value;
    localStorage.setItem("octavo-settings", JSON.stringify(settings));
  };
}
$("ask").onsubmit = (event) => { event.preventDefault(); send(); };
$("text").oninput = grow;
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
};
$("stop").onclick = stop;
addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
$("new").onclick = () => { stop(); chat = null; drawAll(); showSide(false); $("text").focus(); };
$("menu").onclick = () => showSide(!document.body.classList.contains("side"));
$("key-form").onsubmit = (event) => {
  event.preventDefault();
  const typed = $("key").value.trim();
  if (typed && !KEY.test(typed)) {
    $("status").textContent = "Incorrect API key: it has a character that no key has, perhaps one that cannot be seen.";
    return;
  }
  sessionStorage.setItem("octavo-key", typed);
  $("key").value = "";
  loadModels();
};
drawAll();
loadModels();
