// The server's API, as any other client uses it.
export class ApiError extends Error {
  constructor(message, status = null) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(body?.error?.message ?? body?.error ?? `the server answers ${response.status} ${response.statusText}`, response.status);
}

async function post(path, body, key, signal) {
  const sent = { "content-type": "application/json", ...headers(key) };
  return checked(await fetch(path, { method: "POST", headers: sent, body: JSON.stringify(body), signal }));
}

export async function listModels(key) {
  const response = await checked(await fetch("v1/models", { headers: headers(key) }));
  return (await response.json()).data;
}

export async function listToolServers(key) {
  return (await (await checked(await fetch("v1/mcp/servers", { headers: headers(key) }))).json()).servers;
}

export async function callTool(server, tool, given, key, signal) {
  return (await post("v1/mcp/call", { server, tool, arguments: given }, key, signal)).json();
}

// null: not known. Asked only while the model's engine runs, as the question would start it.
export async function takesPictures(model, key) {
  const { models } = await (await checked(await fetch("api/ps", { headers: headers(key) }))).json();
  if (!models.some(({ name }) => name === model || name === `${model}:latest`)) return null;
  const shown = await post("api/show", { model }, key);
  return (await shown.json()).capabilities.includes("vision");
}

async function* lines(response, end) {
  const decoder = new TextDecoder();
  let rest = "";
  const reader = response.body.getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const whole = rest.split(end);
    rest = whole.pop();
    yield* whole.filter(Boolean);
  }
}

// Yields the objects of a stream of server-sent events.
async function* events(response) {
  for await (const part of lines(response, "\n\n")) {
    const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
    if (data === "[DONE]") return;
    if (data) yield JSON.parse(data);
  }
}

// Answers go on when the page is left, for five minutes at least: the server keeps their events until `forget`.
export async function* respond(body, key) {
  const kept = { background: true, stream: true, background_options: { unread_timeout: 300 } };
  yield* parts(await post("v1/responses", { ...body, ...kept }, key));
}

export async function* resume({ id, number }, key) {
  yield* parts(await checked(await fetch(`v1/responses/${id}?stream=true&starting_after=${number}`, { headers: headers(key) })));
}

// Ends it, too, if it is still written.
export function forget({ id }, key) {
  return fetch(`v1/responses/${id}`, { method: "DELETE", headers: headers(key), keepalive: true }).catch(() => null);
}

const TEXTS = { "response.output_text.delta": "text", "response.reasoning_text.delta": "reasoning" };

// Yields {number}, each with one of: id, text, reasoning, call, finish with usage.
async function* parts(response) {
  for await (const event of events(response)) {
    const { type, sequence_number: number, delta, item, response: whole } = event;
    if (event.error || type === "response.failed") throw new ApiError((event.error ?? whole.error).message);
    if (type === "response.created") yield { number, id: whole.id };
    else if (TEXTS[type]) yield { number, [TEXTS[type]]: delta };
    else if (type === "response.output_item.done" && item.type === "function_call") yield { number, call: { id: item.call_id, name: item.name, arguments: item.arguments } };
    else if (type === "response.completed") yield { number, finish: "ended", usage: whole.usage };
    else if (type === "response.incomplete") yield { number, finish: whole.incomplete_details.reason, usage: whole.usage };
  }
}

// Yields what the server says while it fetches a model: {status, total, completed}.
export async function* pull(model, key) {
  for await (const line of lines(await post("api/pull", { model }, key), "\n")) {
    const told = JSON.parse(line);
    if (told.error) throw new ApiError(told.error.message ?? told.error);
    yield told;
  }
}

// Yields what the scheduler of an engine does, as it changes.
export async function* watchScheduler(engine, key, signal) {
  yield* events(await checked(await fetch(`v1/scheduler?engine=${engine}`, { headers: headers(key), signal })));
}
