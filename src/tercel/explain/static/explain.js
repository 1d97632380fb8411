// Shows one step at a time: by the buttons, the slider, the arrow keys, or a click on a token of the answer.
"use strict";
const steps = [...document.querySelectorAll(".step")];
const words = [...document.querySelectorAll("#answer a")];
const [walk, back, on, at, shown] = ["nav", "#back", "#on", "#at", "#shown"].map((name) => document.querySelector(name));
let now = 0;

function show(number) {
  now = Math.min(Math.max(number, 0), steps.length - 1);
  steps.forEach((step, place) => { step.hidden = place !== now; });
  for (const word of words) {
    const current = Number(word.dataset.step) === now;
    word.classList.toggle("current", current);
    current ? word.setAttribute("aria-current", "step") : word.removeAttribute("aria-current");
  }
  at.value = now;
  shown.textContent = `${now} / ${steps.length - 1}`;
  back.disabled = now === 0;
  on.disabled = now === steps.length - 1;
  const answer = document.querySelector(".answer"), word = document.querySelector("#answer a.current");
  if (word) answer.scrollTop = word.offsetTop - answer.offsetTop - answer.clientHeight / 2;
}

function go(number) {
  show(number);
  history.replaceState(null, "", `#step-${now}`);
}

function fromAddress() {
  const named = /^#step-(\d+)$/.exec(location.hash);
  show(named ? Number(named[1]) : now);
}

back.addEventListener("click", () => go(now - 1));
on.addEventListener("click", () => go(now + 1));
at.addEventListener("input", () => go(Number(at.value)));
addEventListener("hashchange", fromAddress);
addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || event.target === at) return;
  if (event.target.closest(".wide")) return; // which scrolls by these keys
  const move = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: steps.length - 1 }[event.key];
  if (move === undefined) return;
  event.preventDefault();
  go(move);
});
walk.hidden = false;
now = Math.min(1, steps.length - 1);
fromAddress();
