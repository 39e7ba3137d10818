// The scheduler at work: follows an engine's snapshots while the view is open and the page is seen.
import { watchScheduler } from "./api.js";
import { find } from "./element.js";
import { FIRST_PREFIX, FIRST_REQUEST, MAX_BARS, cellAt, cellsOf, drawBlocks, drawSteps, gridOf, requestColour, requestStripe, stepAt, tokensOf } from "./pictures.js";

const KEY = "engine-core.view";
const LANES = { waiting: 12, running: 24, preempted: 12 }; // so many are drawn
const isStill = matchMedia("(prefers-reduced-motion: reduce)");
const isNarrow = matchMedia("(max-width: 1000px)");

let following = null; // the stream's AbortController
let isPaused = false;
let latest = null;
let cells = [];
let steps = [];
let rates = []; // [seconds, generated tokens] of the last snapshots
let ordinals = new Map(); // from a request's number to the page's own: #1, #2 ...
let drawing = 0;
let drawnAt = 0;
const cards = new Map(); // of the lanes, by the request's number
const pointed = { steps: null, blocks: null }; // {step, cell or tip} that the reader looks at

const counted = (count) => count.toLocaleString("en");
const plural = (count, word) => `${counted(count)} ${word}${count === 1 ? "" : "s"}`;
const percent = (part, whole) => (whole ? `${+((100 * part) / whole).toFixed(part * 10 < whole ? 1 : 0)}\u00a0%` : "–");

function ordinalOf(number) {
  if (!ordinals.has(number)) ordinals.set(number, ordinals.size + 1);
  return ordinals.get(number);
}

// It is read aloud: a number that counts up is no news.
function say(text, isBad = false) {
  const news = (said) => said.replace(/\d+/g, "");
  if (news(find("view-status").textContent) !== news(text)) find("view-status").textContent = text;
  find("view-status").classList.toggle("error", isBad);
}

// ---------------------------------------------------------------- the stream

async function follow() {
  following?.abort();
  following = null;
  if (find("view").hidden || document.hidden) return;
  const mine = (following = new AbortController());
  while (!mine.signal.aborted) {
    let isFirst = true;
    try {
      for await (const event of watchScheduler(find("engine").value || "0.0", find("key").value, mine.signal)) {
        take(event, isFirst);
        isFirst = false;
      }
      say("The server has ended the view. Trying again.", true);
    } catch (error) {
      if (mine.signal.aborted) return;
      say(`No view: ${error.message}. Trying again.`, true);
    }
    fade(true);
    await new Promise((resolve) => setTimeout(resolve, 1500));
  }
}

function take(event, isFirst) {
  showEngines(event);
  if (event.engine !== find("engine").value) return; // another one is followed now
  if (event.unavailable) {
    say(`The engine is away: ${event.unavailable}. The view goes on when it is back.`, true);
    fade(true);
    return;
  }
  fade(false);
  const restarted = latest && event.statistics.uptime_s < latest.statistics.uptime_s;
  if (isFirst || restarted) [steps, rates] = [[], []];
  if (restarted) ordinals = new Map();
  steps = [...steps, ...event.steps].slice(-MAX_BARS);
  latest = event;
  rates.push([event.statistics.uptime_s, event.statistics.num_generated_tokens]);
  while (rates.length > 2 && rates.at(-1)[0] - rates[0][0] > 2) rates.shift();
  event.requests.forEach((request) => ordinalOf(request.number));
  if (isPaused || drawing) return;
  drawing = isStill.matches ? setTimeout(draw, Math.max(0, drawnAt + 1000 - performance.now())) : requestAnimationFrame(draw);
}

function fade(isAway) {
  find("pictures").classList.toggle("away", isAway);
}

function showEngines({ engines, engine }) {
  const names = Object.entries(engines);
  find("engine").parentElement.hidden = names.length < 2;
  const shown = [...find("engine").options].map((option) => [option.value, option.text]);
  if (shown.join() === names.join()) return;
  find("engine").replaceChildren(...names.map(([id, name]) => new Option(name, id, false, id === engine)));
  if (!shown.length) showEngineOf(find("model").value);
}

// The chat's model, where the server has several.
function showEngineOf(model) {
  const options = [...find("engine").options];
  const wanted = options.find(({ text }) => text.split(" at ")[0].split(", ").includes(model));
  if (!wanted || wanted.selected) return;
  wanted.selected = true;
  find("engine").dispatchEvent(new Event("change"));
}

// ---------------------------------------------------------------- drawing

function draw() {
  drawing = 0;
  if (!latest) return; // another engine was chosen
  drawnAt = performance.now();
  showState();
  showFigures(latest.statistics);
  showSteps();
  showLanes();
  showBlocks();
}

function showState() {
  const { state, num_running, num_waiting } = latest.statistics;
  if (state !== "running") say(`The engine is ${state}.`);
  else say(num_running + num_waiting ? "The engine is at work." : "The engine is idle. Send a message and watch what it does.");
}

// The engine counts them among those that wait.
const numPreempted = () => latest.requests.filter((request) => laneOf(request) === "preempted").length;

function showFigures(figures) {
  const [first, last] = [rates[0], rates.at(-1)];
  const speed = figures.num_running && last[0] > first[0] ? (last[1] - first[1]) / (last[0] - first[0]) : 0;
  const shown = {
    running: figures.num_running,
    waiting: figures.num_waiting - numPreempted(),
    preemptions: figures.num_preemptions,
    speed: Math.round(speed),
    cache: percent(figures.num_blocks_in_use, figures.num_blocks),
    hits: percent(figures.num_cached_prompt_tokens, figures.num_prompt_tokens),
    slo: percent(figures.num_slo_met, figures.num_slo_requests),
  };
  for (const [name, value] of Object.entries(shown)) find(`figure-${name}`).textContent = value.toLocaleString("en");
}

function stepText(step) {
  const all = step.prefill_chunks.map(([number]) => (number ? `#${ordinalOf(number)}` : "others"));
  const owners = all.length > 5 ? [...all.slice(0, 4), `${all.length - 4} more`] : all;
  const parts = [plural(step.num_decode_tokens, "decode")];
  if (owners.length) parts.push(`${plural(tokensOf(step) - step.num_decode_tokens, "prompt token")} of ${owners.join(", ")}`);
  if (step.num_preempted) parts.push(`${step.num_preempted} preempted`);
  return `Step ${step.step_id}, ${Math.round(step.duration_s * 1000)} ms, ${tokensOf(step)} of at most ${step.token_budget} tokens: ${parts.join("; ")}.`;
}

function showSteps() {
  const { step: id, tip } = pointed.steps ?? {};
  const step = steps.find(({ step_id }) => step_id === id);
  drawSteps(find("steps"), steps, ordinalOf, step?.step_id);
  const shown = step ?? steps.at(-1);
  find("steps-text").textContent = tip ?? (shown ? stepText(shown) : "No step yet.");
  if (!find("steps-table").open) return;
  const rows = steps.slice(-10).reverse().map((step) => {
    const row = document.createElement("tr");
    const prompt = tokensOf(step) - step.num_decode_tokens;
    for (const value of [step.step_id, step.num_decode_tokens, prompt, step.token_budget, step.num_preempted, Math.round(step.duration_s * 1000)]) row.insertCell().textContent = value;
    return row;
  });
  find("steps-rows").replaceChildren(...rows);
}

// ---------------------------------------------------------------- requests

const laneOf = ({ status }) => (status === "running" || status === "waiting" ? status : "preempted");

function showLanes() {
  const before = new Map([...cards].map(([number, card]) => [number, [card.dataset.lane, card.getBoundingClientRect()]]));
  const seen = new Set();
  for (const lane of Object.keys(LANES)) {
    const there = latest.requests.filter((request) => laneOf(request) === lane);
    const shown = there.slice(0, LANES[lane]).map((request) => {
      seen.add(request.number);
      return card(request, lane);
    });
    const list = find(`lane-${lane}`);
    if (shown.length !== list.children.length || shown.some((each, index) => each !== list.children[index])) list.replaceChildren(...shown);
    const total = lane === "running" ? latest.statistics.num_running : lane === "waiting" ? latest.statistics.num_waiting - numPreempted() : there.length;
    find(`count-${lane}`).textContent = total;
    find(`more-${lane}`).textContent = total > shown.length ? `and ${total - shown.length} more` : "";
  }
  for (const number of cards.keys()) if (!seen.has(number)) cards.delete(number);
  move(before);
  const why = latest.requests.find((request) => request.why)?.why;
  find("why").textContent = why ? `The first one waits because: ${why}.` : "";
  const finished = Object.entries(latest.statistics.num_finished).filter(([, count]) => count);
  const total = finished.reduce((sum, [, count]) => sum + count, 0);
  find("finished").textContent = `Finished: ${total}` + (total ? ` (${finished.map(([reason, count]) => `${count} ${reason}`).join(", ")})` : "");
}

// A card that changes its lane goes there in sight.
function move(before) {
  if (isStill.matches) return;
  for (const [number, made] of cards) {
    const [lane, from] = before.get(number) ?? [];
    if (!lane || lane === made.dataset.lane) continue;
    const to = made.getBoundingClientRect();
    const start = `translate(${from.left - to.left}px, ${from.top - to.top}px)`;
    made.animate([{ transform: start }, { transform: "none" }], { duration: 400, easing: "ease-out" });
  }
}

function card(request, lane) {
  let made = cards.get(request.number);
  if (!made) {
    made = find("card").content.firstElementChild.cloneNode(true);
    made.querySelector(".dot").style.backgroundColor = requestColour(ordinalOf(request.number));
    made.querySelector(".dot").dataset.stripe = requestStripe(ordinalOf(request.number));
    cards.set(request.number, made);
  }
  made.dataset.lane = lane;
  const { num_prompt_tokens: prompt, num_output_tokens: output, max_tokens: most, num_computed_tokens: computed } = request;
  const isPrefill = computed < prompt;
  const whole = prompt + most;
  made.querySelector(".name").textContent = `#${ordinalOf(request.number)}`;
  made.querySelector(".doing").textContent = lane !== "running" ? `${prompt + output} tokens` : isPrefill ? `${computed}/${prompt}` : `${output}/${most}`;
  made.querySelector(".spoken").textContent = lane !== "running" ? "" : isPrefill ? " tokens of its prompt" : " tokens of its answer";
  made.querySelector(".prompt").style.width = `${(100 * Math.min(computed, prompt)) / whole}%`;
  made.querySelector(".answer").style.width = `${(100 * Math.max(0, Math.min(computed - prompt, most))) / whole}%`;
  const cached = request.num_cached_tokens ? `, ${request.num_cached_tokens} of them found in the cache` : "";
  const again = request.num_preemptions ? `, preempted ${request.num_preemptions}×` : "";
  const tenant = request.tenant ? `\ntenant ${request.tenant}` : "";
  made.title = `${request.request_id}${tenant}\nprompt of ${plural(prompt, "token")}${cached}; ${output} of at most ${plural(most, "answer token")}; ${plural(request.num_blocks, "block")}${again}`;
  return made;
}

// ---------------------------------------------------------------- blocks

function showBlocks() {
  cells = cellsOf(latest.blocks);
  const per = latest.blocks.blocks_per_cell;
  const { cell, tip } = pointed.blocks ?? {};
  drawBlocks(find("blocks"), cells, latest.requests, ordinalOf, per, cell);
  find("blocks-unit").textContent = `A square is ${per === 1 ? "a block" : `${per} blocks`} of ${latest.statistics.block_size} tokens.`;
  find("blocks-text").textContent = tip ?? (cell < cells.length ? cellText(cell) : poolText(cells.length * per));
}

function poolText(drawn) {
  const { num_blocks: all, num_blocks_in_use: used, num_blocks_cached: cached } = latest.statistics;
  const rest = all > drawn ? ` (${counted(all - drawn)} of them not drawn)` : "";
  return `${counted(used)} of ${plural(all, "block")} in use, ${counted(cached)} cached, ${counted(all - used - cached)} empty${rest}.`;
}

function cellText(index) {
  const { owner } = cells[index];
  const per = latest.blocks.blocks_per_cell;
  const name = per === 1 ? `Block ${index + 1}` : `Blocks ${index * per + 1} to ${(index + 1) * per}`;
  if (owner === 0) return `${name}: empty.`;
  if (owner === 1) return `${name}: cached. Whoever's prompt begins alike may reuse it.`;
  if (owner >= FIRST_PREFIX) return `${name}: a beginning that ${latest.blocks.prefixes[owner - FIRST_PREFIX]?.[0] ?? "several"} sequences share.`;
  const request = latest.requests[owner - FIRST_REQUEST];
  return `${name}: of ${request ? `request #${ordinalOf(request.number)}` : "another request"}.`;
}

// ---------------------------------------------------------------- open and closed

function open(isOpen) {
  find("view").hidden = !isOpen;
  document.body.classList.toggle("viewing", isOpen);
  find("show-view").setAttribute("aria-pressed", isOpen);
  find("show-chat").setAttribute("aria-pressed", !isOpen);
  follow();
}

function choose(isOpen) {
  try {
    if (!isNarrow.matches) localStorage.setItem(KEY, isOpen ? "open" : "closed");
  } catch {
    // kept for this page only
  }
  open(isOpen);
}

find("show-view").onclick = () => choose(isNarrow.matches || find("view").hidden);
find("show-chat").onclick = () => choose(false);
find("pause").onclick = () => {
  isPaused = !isPaused;
  find("pause").textContent = isPaused ? "Go on" : "Pause";
  if (!isPaused && latest) draw();
};
find("engine").addEventListener("change", () => {
  latest = null;
  follow();
});
find("key").addEventListener("change", follow);
find("model").addEventListener("shown", () => showEngineOf(find("model").value));
// What the reader points at, by pointer, focus or arrow keys, is told below the picture; null: nothing.
function point(name, at) {
  pointed[name] = at;
  if (latest) draw();
}

const POINTED = {
  steps(event) {
    const found = stepAt(find("steps"), steps, event);
    return found && { step: found.step_id };
  },
  blocks(event) {
    const cell = latest ? cellAt(find("blocks"), cells.length, event) : undefined;
    return cell === undefined ? null : { cell };
  },
};
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function moved(name, [columns, rows]) {
  if (name === "steps") {
    const at = steps.findIndex(({ step_id }) => step_id === pointed.steps?.step);
    const next = steps[at < 0 ? steps.length - 1 : at + columns];
    return next ? { step: next.step_id } : pointed.steps;
  }
  const cell = (pointed.blocks?.cell ?? -1) + columns + rows * gridOf(find("blocks"), cells.length)[0];
  return cell in cells ? { cell } : pointed.blocks;
}

for (const name of ["steps", "blocks"]) {
  const canvas = find(name);
  canvas.addEventListener("pointermove", (event) => point(name, POINTED[name](event)));
  canvas.addEventListener("pointerleave", () => point(name, null));
  canvas.addEventListener("blur", () => point(name, null));
  canvas.addEventListener("focus", () => (find(`${name}-text`).ariaLive = "polite"));
  canvas.addEventListener("blur", () => (find(`${name}-text`).ariaLive = "off"));
  canvas.addEventListener("keydown", (event) => {
    if (!MOVES[event.key] || event.altKey) return;
    event.preventDefault();
    point(name, moved(name, MOVES[event.key]));
  });
  for (const key of find(`${name}-figure`).querySelectorAll(".key")) {
    key.ariaDescription = key.dataset.tip;
    for (const kind of ["pointerenter", "focus", "click"]) key.addEventListener(kind, () => point(name, { tip: key.dataset.tip }));
    for (const kind of ["pointerleave", "blur"]) key.addEventListener(kind, () => point(name, null));
  }
}
const redraw = () => latest && !find("view").hidden && draw();
let width = 0;
new ResizeObserver(([{ contentRect }]) => {
  if (width !== contentRect.width) redraw(); // the pictures' heights are fixed
  ({ width } = contentRect);
}).observe(find("pictures"));
addEventListener("themechange", () => {
  for (const [number, made] of cards) made.querySelector(".dot").style.backgroundColor = requestColour(ordinalOf(number));
  redraw();
});
document.addEventListener("visibilitychange", follow);
isNarrow.addEventListener("change", () => open(!isNarrow.matches && localStorage.getItem(KEY) !== "closed"));
let kept = null;
try {
  kept = localStorage.getItem(KEY);
} catch {
  // the browser keeps nothing
}
open(!isNarrow.matches && kept !== "closed");
