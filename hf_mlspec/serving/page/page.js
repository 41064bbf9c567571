// Which level drafted each token of an answer, and how many come with each pass of the target? A page without a build.
"use strict";

const at = (id) => document.getElementById(id);
const TARGET = "the target";
const levels = [TARGET]; // in the order in which they were first seen; the place is the colour
let messages = [];
let model = "";
let running = null;

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function colour(level) {
  const name = level ?? TARGET;
  if (!levels.includes(name)) levels.push(name);
  return `level${Math.min(levels.indexOf(name), 4)}`;
}

function legend(counts) {
  at("legend").replaceChildren(...levels.map((name) => {
    const item = document.createElement("li");
    const mark = document.createElement("span");
    mark.className = colour(name);
    mark.textContent = counts[name] ? `${name}: ${counts[name]}` : name;
    item.append(mark);
    return item;
  }));
}

function line(kind, text = "") {
  const made = document.createElement("div");
  made.className = kind;
  made.textContent = text;
  at("talk").append(made);
  made.scrollIntoView({ block: "end" });
  return made;
}

// The tokens of a chunk, each in the colour of its level; where a character needs several tokens, all in the first's.
function show(into, choice, text) {
  const names = choice.levels ?? [];
  const texts = choice.token_texts ?? [];
  const parts = texts.join("") === text ? texts.map((part, place) => [part, names[place]]) : [[text, names[0]]];
  for (const [part, level] of parts) {
    const span = document.createElement("span");
    span.className = colour(level);
    span.title = level ?? TARGET;
    span.textContent = part;
    into.append(span);
  }
}

function count(seen, choice) {
  if (!choice.levels?.length) return;
  seen.first ??= performance.now();
  seen.passes += 1;
  seen.tokens += choice.levels.length;
  for (const level of choice.levels) seen.by[level ?? TARGET] = (seen.by[level ?? TARGET] ?? 0) + 1;
  const seconds = (performance.now() - seen.first) / 1000;
  const rate = seconds > 0.05 ? `, ${(seen.tokens / seconds).toFixed(0)} tokens/s` : "";
  at("counts").textContent =
    `${seen.tokens} tokens in ${seen.passes} passes of the target: ${(seen.tokens / seen.passes).toFixed(2)} tokens per pass${rate}`;
  legend(seen.by);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part !== "data: [DONE]") yield JSON.parse(part.slice("data: ".length));
  }
}

async function post(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (response.ok) return response;
  const { error } = await response.json();
  if (response.status === 401) at("needs-key").hidden = false;
  throw Object.assign(new Error(error.message), { code: error.code });
}

async function begin(text, signal) {
  const settings = { model, stream: true, return_levels: true, max_tokens: Number(at("tokens").value),
    temperature: Number(at("temperature").value) };
  const complete = () => post("v1/completions", { ...settings, prompt: text }, signal);
  if (at("way").value === "text") return complete();
  try {
    return await post("v1/chat/completions", { ...settings, messages: [...messages, { role: "user", content: text }] }, signal);
  } catch (error) {
    if (error.code !== "no_chat_template") throw error;
    at("way").value = "text"; // and the page shows it: the model knows no chats
    return complete();
  }
}

async function answer(text) {
  const into = line("answer");
  const seen = { tokens: 0, passes: 0, by: {}, first: null };
  let whole = "";
  for await (const event of events(await begin(text, running.signal))) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    if (!choice) continue;
    const piece = choice.text ?? choice.delta?.reasoning_content ?? choice.delta?.content ?? "";
    whole += choice.delta?.reasoning_content ? "" : piece;
    if (piece) show(into, choice, piece);
    count(seen, choice);
  }
  if (at("way").value === "chat") messages.push({ role: "user", content: text }, { role: "assistant", content: whole });
}

async function send(event) {
  event.preventDefault();
  const text = at("text").value;
  line("question", text);
  at("text").value = "";
  running = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  try {
    model = model || (await named());
    await answer(text);
  } catch (error) {
    if (error.name !== "AbortError") line("error", error.message);
  }
  at("send").disabled = false;
  at("stop").disabled = true;
}

async function named() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) {
    at("needs-key").hidden = response.status !== 401;
    throw new Error((await response.json()).error.message);
  }
  const name = (await response.json()).data[0].id;
  at("model").textContent = name;
  return name;
}

at("ask").addEventListener("submit", send);
at("stop").addEventListener("click", () => running?.abort());
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("ask").requestSubmit();
});
legend({});
named().then((name) => { model = name; }).catch(() => {}); // asked again, and told, with the first question
