// The server's API, as any other client uses it.
export class ApiError extends Error {}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(body?.error?.message ?? `the server answers ${response.status} ${response.statusText}`);
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

// Yields the objects of a stream of server-sent events.
async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  const reader = response.body.getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

// Yields {text, reasoning, calls, finish, usage} as they come.
export async function* chat(body, key, signal) {
  const response = await post("v1/chat/completions", { ...body, stream: true, stream_options: { include_usage: true } }, key, signal);
  for await (const event of events(response)) {
    if (event.error) throw new ApiError(event.error.message);
    const choice = event.choices[0];
    yield {
      text: choice?.delta.content ?? "",
      reasoning: choice?.delta.reasoning ?? choice?.delta.reasoning_content ?? "",
      calls: choice?.delta.tool_calls ?? [],
      finish: choice?.finish_reason,
      usage: event.usage,
    };
  }
}

// Yields what the scheduler of an engine does, as it changes.
export async function* watchScheduler(engine, key, signal) {
  yield* events(await checked(await fetch(`v1/scheduler?engine=${engine}`, { headers: headers(key), signal })));
}
