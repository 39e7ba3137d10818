"""OpenAI's Responses API, over the same generation as chat completions."""
