// The pictures of the view: steps as stacked bars, KV blocks as a grid. Each has its text beside it in view.js.
const HUES = [212, 28, 145, 325, 265, 185, 0, 95, 50, 300, 235, 165]; // the second half in another lightness
export const FIRST_REQUEST = 3;
export const FIRST_PREFIX = 0x8000;

// The look of a name in the page's own colours, light or dark.
function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Of the request that the page calls #ordinal.
export function requestColour(ordinal) {
  const index = ordinal % HUES.length;
  return `hsl(${HUES[index]} 62% ${themed(index < HUES.length / 2 ? "--owner-lightness" : "--owner-lightness-2")})`;
}

function prepared(canvas, height) {
  const width = canvas.clientWidth;
  const scale = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return [pen, width];
}

// ---------------------------------------------------------------- steps

const STEPS_HEIGHT = 116;
const TOP = 14; // for the marks of preemptions
export const MAX_BARS = 100;

export function tokensOf(step) {
  return step.num_decode_tokens + step.prefill_chunks.reduce((sum, [, tokens]) => sum + tokens, 0);
}

export function drawSteps(canvas, steps, ordinalOf) {
  const [pen, width] = prepared(canvas, STEPS_HEIGHT);
  const most = Math.max(8, ...steps.map(tokensOf));
  const budget = steps.at(-1)?.token_budget ?? 0;
  const isBudgetNear = budget && budget <= most * 2;
  const top = isBudgetNear ? Math.max(most, budget) : most;
  const unit = (STEPS_HEIGHT - TOP - 1) / top;
  const bar = width / MAX_BARS;
  const left = (MAX_BARS - steps.length) * bar; // the newest at the right edge
  const y = (tokens) => STEPS_HEIGHT - 1 - tokens * unit;
  pen.font = "11px system-ui, sans-serif";
  steps.forEach((step, index) => {
    const x = left + index * bar;
    const thick = Math.max(1, bar - 1);
    let filled = 0;
    const piece = (tokens, colour) => {
      pen.fillStyle = colour;
      const height = tokens * unit;
      pen.fillRect(x, y(filled + tokens), thick, Math.max(1, height - (height > 4 ? 1 : 0)));
      filled += tokens;
    };
    if (step.num_decode_tokens) piece(step.num_decode_tokens, themed("--decode"));
    for (const [number, tokens] of step.prefill_chunks) piece(tokens, number ? requestColour(ordinalOf(number)) : themed("--others"));
    if (step.num_preempted) {
      pen.fillStyle = themed("--bad");
      pen.beginPath();
      pen.moveTo(x + thick / 2 - 4, 2);
      pen.lineTo(x + thick / 2 + 4, 2);
      pen.lineTo(x + thick / 2, 10);
      pen.fill();
    }
  });
  pen.fillStyle = pen.strokeStyle = themed("--faint");
  const label = isBudgetNear ? `budget ${budget}` : budget ? `budget ${budget} ↑` : "";
  const at = isBudgetNear ? y(budget) + 13 : TOP + 8;
  pen.fillStyle = themed("--ground");
  pen.fillRect(0, at - 10, pen.measureText(label).width + 6, 13);
  pen.fillStyle = themed("--faint");
  pen.fillText(label, 0, at);
  if (isBudgetNear) {
    pen.setLineDash([4, 4]);
    pen.beginPath();
    pen.moveTo(0, y(budget));
    pen.lineTo(width, y(budget));
    pen.stroke();
    pen.setLineDash([]);
  }
  pen.beginPath();
  pen.moveTo(0, STEPS_HEIGHT - 0.5);
  pen.lineTo(width, STEPS_HEIGHT - 0.5);
  pen.stroke();
}

// Which of the steps is drawn there, if any.
export function stepAt(canvas, steps, event) {
  const bar = canvas.clientWidth / MAX_BARS;
  return steps[Math.floor(event.offsetX / bar) - (MAX_BARS - steps.length)];
}

// ---------------------------------------------------------------- blocks

function decoded(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

export function cellsOf(blocks) {
  const bytes = decoded(blocks.owners);
  const levels = decoded(blocks.levels);
  return Array.from(levels, (level, index) => ({ owner: bytes[2 * index] | (bytes[2 * index + 1] << 8), level: level / 255 }));
}

function columns(canvas, numCells) {
  const width = canvas.clientWidth;
  const wanted = Math.sqrt((width * 150) / Math.max(1, numCells));
  const count = Math.ceil(width / Math.min(28, Math.max(5, wanted)));
  return [count, width / count];
}

export function drawBlocks(canvas, cells, requests, ordinalOf) {
  const [count, size] = columns(canvas, cells.length);
  const [pen] = prepared(canvas, Math.max(1, Math.ceil(cells.length / count)) * size);
  const inner = size - (size > 8 ? 2 : 1);
  const [empty, line, cached, others, ground] = ["--raised", "--line", "--cached", "--others", "--ground"].map(themed);
  const colours = requests.map((request) => requestColour(ordinalOf(request.number)));
  cells.forEach(({ owner, level }, index) => {
    const x = (index % count) * size;
    const y = Math.floor(index / count) * size;
    pen.fillStyle = empty;
    pen.fillRect(x, y, inner, inner);
    if (owner === 0) {
      pen.strokeStyle = line;
      pen.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
      return;
    }
    pen.globalAlpha = 0.3 + 0.7 * level;
    if (owner >= FIRST_PREFIX) pen.fillStyle = themed(`--prefix-${(owner - FIRST_PREFIX) % 4}`);
    else if (owner >= FIRST_REQUEST) pen.fillStyle = colours[owner - FIRST_REQUEST] ?? others;
    else pen.fillStyle = owner === 1 ? cached : others;
    pen.fillRect(x, y, inner, inner);
    pen.globalAlpha = 1;
    pen.fillStyle = ground;
    const middle = [x + inner / 2, y + inner / 2];
    if (owner >= FIRST_PREFIX) {
      pen.beginPath();
      pen.arc(...middle, inner / 4, 0, 7);
      pen.fill();
    } else if (owner === 1) pen.fillRect(x + inner * 0.2, y + inner * 0.2, inner * 0.6, inner * 0.6);
  });
}

export function cellAt(canvas, numCells, event) {
  const [count, size] = columns(canvas, numCells);
  const index = Math.floor(event.offsetY / size) * count + Math.floor(event.offsetX / size);
  return index < numCells ? index : undefined;
}
