"""GET /metrics: what this server saw of requests, and what its engines count."""
