"""Embeddings, classes, scores and rankings by the shapes of OpenAI, vLLM, Jina and Cohere."""
