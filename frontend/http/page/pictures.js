// The pictures of the view: steps as stacked bars, KV blocks as a grid. Each has its text beside it in view.js.
const HUES = [212, 28, 145, 325, 265, 185, 0, 95, 50, 300, 235, 165]; // the second half in another lightness
export const FIRST_REQUEST = 3;
export const FIRST_PREFIX = 0x8000;

// The look of a name in the page's own colours, light or dark.
function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const isOfSecondHalf = (ordinal) => (ordinal - 1) % HUES.length >= HUES.length / 2;

// Of the request that the page calls #ordinal.
export function requestColour(ordinal) {
  const lightness = themed(isOfSecondHalf(ordinal) ? "--owner-lightness-2" : "--owner-lightness");
  return `hsl(${HUES[(ordinal - 1) % HUES.length]} 62% ${lightness})`;
}

// Requests beyond the colours have a stripe, too: 0 none, 1 across, 2 upright, 3 both edges; as .dot[data-stripe].
export function requestStripe(ordinal) {
  return Math.floor((ordinal - 1) / HUES.length) % 4;
}

// Over a rectangle that is filled already.
function drawStripe(pen, stripe, x, y, width, height) {
  const parts = [[], [[0, 1 / 3, 1, 1 / 3]], [[1 / 3, 0, 1 / 3, 1]], [[0, 0, 1, 1 / 4], [0, 3 / 4, 1, 1 / 4]]];
  pen.fillStyle = themed("--ground");
  for (const [left, top, wide, high] of parts[stripe]) pen.fillRect(x + left * width, y + top * height, wide * width, high * height);
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

const STEPS_HEIGHT = 132;
const TOP = 14; // for the marks of preemptions
const BOTTOM = STEPS_HEIGHT - 15; // below it the numbers of steps
const LEFT = 38; // before it those of tokens
export const MAX_BARS = 100;

export function tokensOf(step) {
  return step.num_decode_tokens + step.prefill_chunks.reduce((sum, [, tokens]) => sum + tokens, 0);
}

// `marked` is the number of a step.
export function drawSteps(canvas, steps, ordinalOf, marked) {
  const [pen, width] = prepared(canvas, STEPS_HEIGHT);
  const most = Math.max(8, ...steps.map(tokensOf));
  const budget = steps.at(-1)?.token_budget ?? 0;
  const isBudgetNear = budget && budget <= most * 2;
  const top = isBudgetNear ? Math.max(most, budget) : most;
  const unit = (BOTTOM - TOP) / top;
  const bar = (width - LEFT) / MAX_BARS;
  const left = LEFT + (MAX_BARS - steps.length) * bar; // the newest at the right edge
  const y = (tokens) => BOTTOM - tokens * unit;
  pen.font = "11px system-ui, sans-serif";
  const line = (tokens) => {
    pen.beginPath();
    pen.moveTo(LEFT, y(tokens));
    pen.lineTo(width, y(tokens));
    pen.stroke();
  };
  const number = (value, x, y, align) => {
    pen.fillStyle = themed("--faint");
    pen.textAlign = align;
    pen.fillText(value.toLocaleString("en"), x, y);
  };
  pen.strokeStyle = themed("--line");
  for (const tokens of ticks(top)) {
    line(tokens);
    number(tokens, LEFT - 5, y(tokens) + 4, "right");
  }
  steps.forEach((step, index) => {
    const x = left + index * bar;
    const thick = Math.max(1, bar - 1);
    if (step.step_id % 20 === 0 && x > LEFT + 12) number(step.step_id, Math.min(x + thick / 2, width - 14), STEPS_HEIGHT - 2, "center");
    let filled = 0;
    const piece = (tokens, colour, stripe) => {
      pen.fillStyle = colour;
      const height = tokens * unit;
      pen.fillRect(x, y(filled + tokens), thick, Math.max(1, height - (height > 4 ? 1 : 0)));
      if (stripe && height > 4) drawStripe(pen, stripe, x, y(filled + tokens), thick, height - 1);
      filled += tokens;
    };
    if (step.num_decode_tokens) piece(step.num_decode_tokens, themed("--decode"));
    for (const [request, tokens] of step.prefill_chunks)
      piece(tokens, request ? requestColour(ordinalOf(request)) : themed("--others"), request && requestStripe(ordinalOf(request)));
    if (step.step_id === marked) {
      pen.strokeStyle = themed("--text");
      pen.strokeRect(x - 0.5, TOP, thick + 1, BOTTOM - TOP);
    }
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
  pen.textAlign = "left";
  pen.fillStyle = themed("--ground");
  pen.fillRect(LEFT, at - 10, pen.measureText(label).width + 6, 13);
  pen.fillStyle = themed("--faint");
  pen.fillText(label, LEFT, at);
  if (isBudgetNear) {
    pen.setLineDash([4, 4]);
    line(budget);
    pen.setLineDash([]);
  }
}

// 0 and multiples of a 1, 2 or 5 of some decade, three to five in all.
export function ticks(top) {
  const unit = 10 ** Math.floor(Math.log10(top / 2));
  const step = [5, 2, 1].map((factor) => factor * unit).find((size) => size <= top / 2);
  return Array.from({ length: Math.floor(top / step) + 1 }, (_, index) => index * step);
}

// Which of the steps is drawn there, if any.
export function stepAt(canvas, steps, event) {
  const bar = (canvas.clientWidth - LEFT) / MAX_BARS;
  return steps[Math.floor((event.offsetX - LEFT) / bar) - (MAX_BARS - steps.length)];
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

const BLOCKS_HEIGHT = 144;
const MOST_SIZE = 28; // pixels of a square
const NUMBERED = 15; // from here on a number fits

// How many squares are in a row, and their size: all fit into the height.
export function gridOf(canvas, numCells) {
  const width = canvas.clientWidth - LEFT;
  let count = Math.ceil(width / MOST_SIZE);
  while (Math.ceil(numCells / count) * (width / count) > BLOCKS_HEIGHT) count++;
  return [count, width / count];
}

// `marked` is the index of a cell.
export function drawBlocks(canvas, cells, requests, ordinalOf, perCell, marked) {
  const [count, size] = gridOf(canvas, cells.length);
  const [pen] = prepared(canvas, BLOCKS_HEIGHT);
  const inner = size - (size > 8 ? 2 : 1);
  const [empty, line, cached, others, ground, faint, text] = ["--raised", "--line", "--cached", "--others", "--ground", "--faint", "--text"].map(themed);
  const colours = requests.map((request) => requestColour(ordinalOf(request.number)));
  const stripes = requests.map((request) => requestStripe(ordinalOf(request.number)));
  const write = (value, x, y, align, colour, font) => {
    Object.assign(pen, { font: `${font}px system-ui, sans-serif`, textAlign: align, fillStyle: colour });
    pen.fillText(value.toLocaleString("en"), x, y);
  };
  const rows = Math.ceil(cells.length / count);
  const every = Math.ceil(rows / (BLOCKS_HEIGHT / 24)); // rows that have a number
  for (let row = 0; row < rows; row += every) write(row * count * perCell, LEFT - 5, Math.max(9, row * size + Math.min(size, 14) - 2), "right", faint, 11);
  cells.forEach(({ owner, level }, index) => {
    const x = LEFT + (index % count) * size;
    const y = Math.floor(index / count) * size;
    const request = owner - FIRST_REQUEST;
    pen.fillStyle = empty;
    pen.fillRect(x, y, inner, inner);
    if (owner === 0) {
      pen.strokeStyle = line;
      pen.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
    } else {
      pen.globalAlpha = 0.3 + 0.7 * level;
      if (owner >= FIRST_PREFIX) pen.fillStyle = themed(`--prefix-${(owner - FIRST_PREFIX) % 4}`);
      else pen.fillStyle = (owner >= FIRST_REQUEST ? colours[request] : owner === 1 && cached) || others;
      pen.fillRect(x, y, inner, inner);
      pen.globalAlpha = 1;
      pen.fillStyle = ground;
      if (owner >= FIRST_PREFIX) {
        pen.beginPath();
        pen.arc(x + inner / 2, y + inner / 2, inner / 4, 0, 7);
        pen.fill();
      } else if (owner === 1) pen.fillRect(x + inner * 0.2, y + inner * 0.2, inner * 0.6, inner * 0.6);
      else if (requests[request] && inner >= NUMBERED) {
        const ordinal = ordinalOf(requests[request].number);
        if (cells[index - 1]?.owner !== owner) write(ordinal, x + inner / 2, y + inner / 2 + 4, "center", isOfSecondHalf(ordinal) ? text : ground, 9);
      } else if (stripes[request]) drawStripe(pen, stripes[request], x, y, inner, inner);
    }
    if (index !== marked) return;
    Object.assign(pen, { strokeStyle: text, lineWidth: 2 });
    pen.strokeRect(x, y, inner, inner);
    pen.lineWidth = 1;
  });
}

export function cellAt(canvas, numCells, event) {
  const [count, size] = gridOf(canvas, numCells);
  const column = Math.floor((event.offsetX - LEFT) / size);
  const index = Math.floor(event.offsetY / size) * count + column;
  return column >= 0 && index < numCells ? index : undefined;
}
