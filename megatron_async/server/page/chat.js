// The chat: messages, one answer at a time, its figures, and how it is stopped. It is kept for this
// tab (sessionStorage), so that a reload does not lose it.

import { ApiError, ask, events } from "./api.js";
import { element, hideTip, TokenText } from "./tokens.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const KEPT = "megatron_async.chat";
const MOST_TOKENS = 2048; // of an answer, where neither a person nor the server has set a limit
const by = (id) => document.getElementById(id);
const [list, form, text, send, stop] = ["messages", "ask", "text", "send", "stop"].map(by);

let turns = []; // of the conversation, as the server wants them
let running = null; // what ends the answer that is being written
let writing = null; // that answer
let served = null; // the model, as /v1/models tells of it
let used = 0; // tokens of the conversation so far

// Wire the form up; `refused` is told of a key that is wrong or missing.
export function openChat(refused) {
  const submit = () => {
    if (!running && text.value.trim()) answer(text.value.trim(), refused);
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  stop.addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing) running?.abort();
  });
  by("new-chat").addEventListener("click", () => {
    running?.abort();
    turns = [];
    used = 0;
    keep();
    list.replaceChildren();
    hideTip();
    text.focus();
  });
  by("shading").addEventListener("change", (event) => list.classList.toggle("shaded", event.target.checked));
  addEventListener("pagehide", keep);
  restore();
}

// What a request that says nothing gets, shown where a person may say something else.
export function showDefaults(model) {
  served = model;
  const defaults = model.generation_defaults ?? {};
  for (const name of NUMBERS) {
    const value = defaults[name];
    if (value !== undefined && value !== null) by(name).placeholder = `default ${value}`;
  }
  const most = defaults.max_tokens ?? ownLimit();
  by("max_tokens").placeholder = most === undefined ? "as many as fit" : `default ${most}`;
}

// The page's limit of an answer: room that the context surely has; undefined: the rest of it.
function ownLimit() {
  if (!served || served.generation_defaults?.max_tokens) return undefined;
  const most = Math.min(MOST_TOKENS, Math.floor((served.max_model_len - used) / 2));
  return most > 0 ? most : undefined;
}

function keep() {
  const system = by("system").value;
  const said = writing?.content ? [...turns, { role: "assistant", content: writing.content }] : turns;
  try {
    if (said.length || system) sessionStorage.setItem(KEPT, JSON.stringify({ turns: said, system }));
    else sessionStorage.removeItem(KEPT);
  } catch { /* storage is full or switched off: the chat lives as long as the page */ }
}

function restore() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
    by("system").value = kept.system ?? "";
    turns = (kept.turns ?? []).filter(({ role, content }) => role && typeof content === "string");
  } catch {
    turns = [];
  }
  if (turns.at(-1)?.role === "user") { // no word of its answer had come
    const question = turns.pop().content;
    if (!text.value) text.value = question;
  }
  for (const { role, content } of turns) {
    if (role === "user") message("user", "You").append(content);
    else new TokenText(message("assistant", "Model")).say(content);
  }
  list.scrollTop = list.scrollHeight;
}

function asked() {
  const body = {
    messages: [...turns], stream: true, stream_options: { include_usage: true },
    logprobs: true, top_logprobs: 5,
  };
  const system = by("system").value.trim();
  if (system) body.messages.unshift({ role: "system", content: system });
  for (const name of NUMBERS) {
    if (by(name).value !== "") body[name] = Number(by(name).value);
  }
  body.max_tokens ??= ownLimit(); // undefined is left out
  return body;
}

async function answer(question, refused) {
  const own = new AbortController();
  running = own;
  turns.push({ role: "user", content: question });
  message("user", "You").append(question);
  text.value = "";
  const said = message("assistant", "Model");
  const before = turns;
  const writer = writing = new Answer(said);
  setRunning(true);
  try {
    const reply = await ask("v1/chat/completions", asked(), own.signal);
    for await (const event of events(reply)) writer.take(event);
    writer.end();
  } catch (error) {
    writer.end(error.name === "AbortError" ? "stopped" : "failed");
    if (error.name !== "AbortError") {
      if (!(error instanceof ApiError)) console.error(error);
      said.parentElement.append(element("p", "error", error.message));
      said.parentElement.lastChild.setAttribute("role", "alert");
      if (error.status === 401) refused(error);
    }
  }
  if (turns === before) { // no new chat was begun meanwhile
    if (writer.content) turns.push({ role: "assistant", content: writer.content });
    else {
      turns.pop(); // as if it had not been asked: it can be asked again
      if (!text.value) text.value = writer.reason === "failed" ? question : "";
    }
  }
  if (writing === writer) writing = null;
  used = writer.used || used;
  keep();
  if (running === own) {
    running = null;
    setRunning(false);
  }
}

function setRunning(is) {
  send.hidden = is;
  stop.hidden = !is;
  if (!is && document.activeElement === document.body) text.focus();
}

function message(kind, who) {
  const box = element("div", `message ${kind}`);
  const said = element("div", "said");
  box.append(element("div", "who", who), said);
  list.append(box);
  list.scrollTop = list.scrollHeight;
  return said;
}

// Writes one answer, and what is to be told of it.
class Answer {
  constructor(said) {
    this.said = said;
    this.tokens = new TokenText(said);
    this.facts = element("div", "facts");
    said.after(this.facts);
    said.classList.add("writing");
    said.setAttribute("aria-busy", "true");
    this.content = "";
    this.reason = "";
    this.count = 0; // tokens so far
    this.used = 0; // with those of the prompt
    this.begun = performance.now();
    this.first = this.last = 0;
  }

  take(event) {
    if (event.usage) {
      this.count = event.usage.completion_tokens;
      this.used = event.usage.total_tokens;
    }
    const choice = event.choices[0];
    if (!choice) return;
    const { content, reasoning_content: thought } = choice.delta;
    const logProbs = choice.logprobs?.content ?? [];
    if (logProbs.length) {
      this.last = performance.now();
      this.first ||= this.last;
      this.count += logProbs.length;
    }
    const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    if (thought) this.think(thought);
    this.content += content ?? "";
    if (content || logProbs.length) this.tokens.push(content ?? "", logProbs);
    if (choice.finish_reason) this.reason = choice.finish_reason;
    if (!this.told || this.last - this.told > 250) this.tell();
    if (isAtEnd) list.scrollTop = list.scrollHeight;
  }

  think(thought) {
    if (!this.thought) {
      const details = element("details", "thoughts");
      this.thought = element("div", "thought");
      details.append(element("summary", "", "Thoughts"), this.thought);
      this.said.before(details);
    }
    this.thought.append(thought);
  }

  end(reason) {
    if (reason) this.reason = reason;
    this.tokens.end();
    this.said.classList.remove("writing");
    this.said.removeAttribute("aria-busy");
    this.tell();
    list.scrollTop = list.scrollHeight;
  }

  tell() {
    this.told = this.last;
    const told = [];
    if (this.first) {
      told.push(`first token ${time(this.first - this.begun)}`);
      if (this.count > 1) {
        const rate = (1000 * (this.count - 1)) / Math.max(this.last - this.first, 0.1);
        told.push(`${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`);
      }
      told.push(`${this.count} token${this.count === 1 ? "" : "s"}`);
    }
    const why = { length: "cut off at the limit of tokens", stopped: "stopped", abort: "aborted" }[this.reason];
    if (why) told.push(why);
    this.facts.replaceChildren(...told.map((part) => element("span", "", part)));
  }
}

export function time(ms) {
  return ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(2)} s`;
}
