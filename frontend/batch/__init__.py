"""A file of requests to a file of answers. It knows neither Ray nor where its engines run."""
