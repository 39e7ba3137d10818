"""What the APIs of OpenAI, Anthropic and Ollama share: requests in the common form, their
translation, and what an answer is made of."""
