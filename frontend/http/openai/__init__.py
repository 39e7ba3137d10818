"""OpenAI's routes. Fields beside OpenAI's have vLLM's names."""
