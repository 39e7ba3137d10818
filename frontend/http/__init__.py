"""`engine-client http`: OpenAI's API over `AsyncLLM`. One process, one event loop."""
