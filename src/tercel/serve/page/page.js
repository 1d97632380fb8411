// The chat: what is asked, answers as they come, and the tree of any token's step.
"use strict";
import { chunks } from "./stream.js";

const of = (id) => document.getElementById(id);
const [log, ask, text, room, panel] = ["log", "ask", "text", "room", "panel"].map(of);
let messages = []; // of the conversation, as the server wants them
let stop = null; // ends the answer that is coming
let open = null; // { answer, number, from }: the step that is shown, and the word it was asked from

function made(tag, kind, content = "") {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = content;
  return element;
}

function say(sentence, failed = false) {
  of("said").textContent = sentence;
  of("said").className = failed ? "failure" : "";
}

// One answer in the conversation: its words, its figures, its steps.
class Answer {
  constructor(into, name) {
    this.steps = [];
    this.content = "";
    this.tokens = 0;
    this.began = null; // when the first token was there
    this.seconds = {};
    this.box = made("section", "answer");
    this.text = made("p", "text");
    this.figures = made("p", "figures");
    this.box.append(made("h2", "", name), this.text, this.figures);
    into.append(this.box);
  }

  take(choice) {
    this.content += choice.delta.content ?? "";
    const step = choice.trace;
    if (!step) return;
    const place = this.steps.push(step) - 1;
    for (const token of step.tokens) this.text.append(this.word(token, place));
    this.began ??= performance.now();
    this.tokens += step.tokens.filter((token) => token.token !== null).length;
    for (const [phase, seconds] of Object.entries(step.seconds)) {
      this.seconds[phase] = (this.seconds[phase] ?? 0) + seconds;
    }
    this.show(performance.now());
  }

  word(token, place) {
    const blank = token.text && !token.text.trim() ? " blank" : "";
    const word = made("a", `word ${token.drafted ? "drafted" : "own"}${blank}`, token.text || "·");
    word.href = "#";
    word.addEventListener("click", (event) => {
      event.preventDefault();
      look(this, place, word);
    });
    return word;
  }

  show(now) {
    const last = this.steps.at(-1), after = (now - this.began) / 1000;
    const rate = after > 0 && this.tokens > 1 ? `${((this.tokens - 1) / after).toFixed(1)} tokens/s, ` : "";
    const counted = `${this.tokens} ${this.tokens === 1 ? "token" : "tokens"}`;
    this.figures.textContent = `τ ${last.tau.toFixed(2)}, ${rate}${counted} in ${this.steps.length - 1} steps`;
    const { target = 0, head = 0, tree = 0, draft = 0, ...others } = this.seconds;
    const parts = { target, draft: head + tree + draft, rest: Object.values(others).reduce((a, b) => a + b, 0) };
    const all = parts.target + parts.draft + parts.rest;
    if (all > 0) this.figures.append(document.createElement("br"), ...shares(parts, all));
  }
}

// Where the time went: in words, and as a bar.
function shares(parts, all) {
  const names = { target: "target", draft: "drafting", rest: "the rest" };
  const words = Object.entries(parts).map(([kind, value]) => `${names[kind]} ${Math.round((100 * value) / all)} %`);
  const bar = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of Object.entries({ class: "shares", viewBox: "0 0 100 4", preserveAspectRatio: "none" })) {
    bar.setAttribute(name, value);
  }
  bar.setAttribute("aria-hidden", "true");
  let at = 0;
  for (const [kind, value] of Object.entries(parts)) {
    const part = document.createElementNS(bar.namespaceURI, "rect"), width = (100 * value) / all;
    for (const [name, number] of Object.entries({ x: at, width, height: 4 })) part.setAttribute(name, number);
    part.setAttribute("class", kind);
    bar.append(part);
    at += width;
  }
  return [`time: ${words.join(", ")}`, bar];
}

// The panel. A step comes as HTML that this server made, in which all foreign text is text.
function look(answer, number, from) {
  open?.from?.classList.remove("current");
  open = { answer, number, from: from ?? [...answer.text.children].find((word, place) => stepOf(answer, place) === number) };
  open.from?.classList.add("current");
  const parsed = new DOMParser().parseFromString(answer.steps[number].html, "text/html");
  of("step").replaceChildren(...parsed.body.children);
  of("place").textContent = `${number} / ${answer.steps.length - 1}`;
  of("back").disabled = number === 0;
  of("on").disabled = number === answer.steps.length - 1;
  panel.hidden = false;
  room.classList.add("open");
  if (from) of("close").focus();
}

function stepOf(answer, place) {
  let before = 0;
  return answer.steps.findIndex((step) => (before += step.tokens.length) > place);
}

function walk(by) {
  const number = open.number + by;
  if (number >= 0 && number < open.answer.steps.length) look(open.answer, number);
}

function close() {
  panel.hidden = true;
  room.classList.remove("open");
  open?.from?.classList.remove("current");
  open?.from?.focus();
  open = null;
}

of("back").addEventListener("click", () => walk(-1));
of("on").addEventListener("click", () => walk(1));
of("close").addEventListener("click", close);
addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || !open) return;
  if (event.key === "Escape") close();
  else if (/^(TEXTAREA|INPUT)$/.test(event.target.tagName) || event.target.closest?.(".wide")) return;
  else if (event.key === "ArrowLeft") walk(-1);
  else if (event.key === "ArrowRight") walk(1);
});

// Asking.
function body(draft) {
  const number = (id) => (of(id).value === "" ? undefined : Number(of(id).value));
  return {
    messages, draft, stream: true, trace: true,
    temperature: number("temperature") ?? 0, seed: number("seed"), max_completion_tokens: number("most"),
  };
}

async function answered(answer, draft) {
  for await (const chunk of chunks(body(draft), of("key").value.trim(), stop.signal)) {
    if (chunk.choices.length) answer.take(chunk.choices[0]);
  }
}

async function send(question) {
  log.append(made("p", "question text", question));
  messages.push({ role: "user", content: question });
  const answers = made("div", "answers");
  log.append(answers);
  answers.scrollIntoView({ block: "nearest" });
  stop = new AbortController();
  busy(true);
  const first = new Answer(answers, of("both").checked ? "with drafts" : "answer");
  try {
    await answered(first, true);
    if (of("both").checked) await answered(new Answer(answers, "without drafts"), false); // never both at once
    say("The answer is complete.");
  } catch (error) {
    const stopped = error.name === "AbortError";
    say(stopped ? "Stopped." : error.message, !stopped);
  }
  if (first.content) messages.push({ role: "assistant", content: first.content });
  else messages.pop(); // what was refused is not asked again with the next message
  if (!first.steps.length) answers.remove();
  busy(false);
  text.focus();
}

function busy(is) {
  of("send").disabled = of("new").disabled = is;
  of("stop").disabled = !is;
  if (is) say("Answering …");
}

ask.addEventListener("submit", (event) => {
  event.preventDefault();
  const question = text.value.trim();
  if (!question || of("send").disabled) return;
  text.value = "";
  send(question);
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask.requestSubmit();
});
of("stop").addEventListener("click", () => stop?.abort());
of("new").addEventListener("click", () => {
  messages = [];
  log.replaceChildren();
  if (open) close();
  say("");
  text.focus();
});

fetch("v1/models").then((answer) => (answer.ok ? answer.json() : null)).then((known) => {
  if (known) of("model").textContent = known.data[0].id;
}, () => say("the server does not answer", true));
